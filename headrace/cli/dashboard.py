"""`headrace dashboard`: one of the dashboards as a page, from Prometheus, for where there is no Grafana."""

from __future__ import annotations

import argparse
import http.client
import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from headrace.cli import output, trace_page

DEFAULT_PROMETHEUS = "http://127.0.0.1:9090"
TIMEOUT_S = 10.0
POINTS = 120
RATE_INTERVAL = "1m"


class PrometheusError(Exception):
    """The numbers cannot be had; the message is one line."""


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "dashboard",
        help="write a dashboard as a page, from Prometheus",
        description="Asks Prometheus what a Grafana dashboard asks, and writes a page that opens anywhere, offline.",
        epilog=output.EXIT_CODES,
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="deploy/observability/dashboards/serving.json")
    parser.add_argument("--html", metavar="FILE", type=Path, required=True, help="where the page goes")
    parser.add_argument("--prometheus", metavar="URL", default=DEFAULT_PROMETHEUS, help="(%(default)s)")
    parser.add_argument("--minutes", type=output.positive, default=15, help="how far back (%(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it; raises CommandError."""
    now = time.time()
    try:
        dashboard = json.loads(arguments.file.read_text(encoding="utf-8"))
        panels = [
            _panel(panel, arguments.prometheus, now - 60 * arguments.minutes, now) for panel in dashboard["panels"]
        ]
        data = {"title": dashboard["title"], "about": dashboard.get("description", ""), "panels": panels}
        arguments.html.write_text(trace_page.fill("dashboard.html", data), encoding="utf-8")
    except PrometheusError as error:
        raise output.CommandError(str(error), output.BAD_USAGE) from error
    except OSError as error:
        raise output.CommandError(f"{error.filename}: {error.strerror}", output.BAD_USAGE) from error
    except (ValueError, KeyError, TypeError) as error:
        raise output.CommandError(f"{arguments.file} is no dashboard ({error})", output.BAD_USAGE) from error
    return output.OK


def _panel(panel: dict[str, Any], base_url: str, start: float, end: float) -> dict[str, Any]:
    if panel["type"] == "heatmap":
        return {"title": panel["title"], "unit": "", "series": [], "note": "a heat map: see it in Grafana"}
    series = [
        {"name": name, "points": points}
        for target in panel["targets"]
        for name, points in query(base_url, target["expr"], target["legendFormat"], start, end)
    ]
    defaults = panel["fieldConfig"]["defaults"]
    stacked = "stacking" in defaults["custom"]
    return {"title": panel["title"], "unit": defaults["unit"], "stacked": stacked, "series": series, "note": ""}


def query(base_url: str, expression: str, legend: str, start: float, end: float) -> list[tuple[str, list[list[float]]]]:
    """Series of an expression: name, and points of (seconds before the end, value).

    Raises:
        PrometheusError: Prometheus does not answer, or does not take the expression.
    """
    if not base_url.startswith(("http://", "https://")):
        raise PrometheusError(f"--prometheus {base_url}: expected http://host:port")
    asked = expression.replace("$__rate_interval", RATE_INTERVAL)
    parameters = {"query": asked, "start": start, "end": end, "step": max(1, (end - start) // POINTS)}
    url = f"{base_url.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - the scheme was checked
            result = json.load(answer)["data"]["result"]
            return [(_named(legend, one["metric"]), _points(one["values"], end)) for one in result]
    except urllib.error.HTTPError as error:
        with error:
            raise PrometheusError(f"Prometheus at {base_url} answers HTTP {error.code} to {asked}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise PrometheusError(f"Prometheus at {base_url} does not answer ({reason}); is it running?") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise PrometheusError(f"{base_url} answers, but not as Prometheus does") from None


def _points(values: list[list[Any]], end: float) -> list[list[float]]:
    found = ([round(float(at) - end, 1), float(value)] for at, value in values)
    return [point for point in found if math.isfinite(point[1])]


def _named(legend: str, labels: dict[str, str]) -> str:
    for label, value in labels.items():
        legend = legend.replace("{{" + label + "}}", value)
    return legend
