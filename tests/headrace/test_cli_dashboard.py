"""Guarantees of `headrace dashboard`: the page has what Prometheus says and needs nothing beside it."""

from __future__ import annotations

import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.__main__ import main

DASHBOARD = Path(__file__).parents[2] / "deploy" / "observability" / "dashboards" / "serving.json"


@pytest.fixture
def prometheus() -> Iterator[tuple[str, list[str]]]:
    """A Prometheus that has one series for everything, and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            asked.append(query["query"][0])
            values = [[float(query["end"][0]) - 60, "1.5"], [float(query["end"][0]), "NaN"]]
            series = [{"metric": {"outcome": "</script>stop"}, "values": values}]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": {"result": series}}).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", asked
        http.shutdown()
        thread.join()


def test_a_page_of_a_dashboard(prometheus: tuple[str, list[str]], tmp_path: Path) -> None:
    """Every panel with its series, legends filled in, values that are no number left out; nothing from outside."""
    url, asked = prometheus
    page = tmp_path / "serving.html"
    assert main(["dashboard", str(DASHBOARD), "--prometheus", url, "--html", str(page)]) == 0
    text = page.read_text()
    data = json.loads(re.search(r"const data = (\{.*\});", text).group(1))
    panels = {panel["title"]: panel for panel in data["panels"]}
    assert len(panels) == len(json.loads(DASHBOARD.read_text())["panels"])
    assert panels["Requests by outcome"]["series"] == [{"name": "</script>stop", "points": [[-60.0, 1.5]]}]
    assert not [expression for expression in asked if "$" in expression]
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://""", text)
    assert text.count("</script>") == 1


@pytest.mark.parametrize(
    ("file", "url", "sentence"),
    [
        (str(DASHBOARD), "http://127.0.0.1:1", "does not answer"),
        (str(DASHBOARD), "file:///etc", "expected http"),
        ("/no/such/file", "http://127.0.0.1:1", "/no/such/file"),
        (__file__, "http://127.0.0.1:1", "is no dashboard"),
    ],
)
def test_what_cannot_be_had(
    file: str, url: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prometheus away, a file that is not there or is none: exit code 2, one line."""
    assert main(["dashboard", file, "--prometheus", url, "--html", str(tmp_path / "x.html")]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1
