"""Dashboards, rules and alerts name metrics that exist, and say what they should; advice leads somewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deploy.observability import dashboards
from services.common import metric_names, names
from services.common.settings import describe
from services.engine.settings import EngineProcessSettings
from services.gateway.settings import GatewaySettings
from services.stream.settings import StreamSettings

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "deploy" / "observability"
SERIES = {name: metric for metric in metric_names.ALL for name in metric.series}
RULES = [
    rule
    for file in ("recording.rules.yml", "alerts.rules.yml")
    for group in yaml.safe_load((PLACE / file).read_text())["groups"]
    for rule in group["rules"]
]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
OURS = re.compile(r"\b(?:gen_ai|headrace|hw|process|rpc)[\w:]*\b")
MATCHERS = re.compile(r"(\w+)\{([^}]*)\}")
OF_PROMETHEUS = {"instance", "job", "le", "process"}
PROMTOOL = shutil.which("promtool")  # of Debian's package prometheus
NEEDS_PROMTOOL = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here")


def expressions() -> Iterator[tuple[str, str]]:
    """Where an expression is, and the expression."""
    for rule in RULES:
        yield rule.get("record") or rule["alert"], rule["expr"]
    for file in sorted((PLACE / "dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{file.stem}: {panel['title']}", target["expr"]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_metric_exists(where: str, expression: str) -> None:
    """Each metric is one that a process offers or a rule records, with the labels it has."""
    words = re.sub(r"\{[^}]*\}|\b(?:by|ignoring|group_left)\s*\([^)]*\)|\"[^\"]*\"", "", expression)
    for name in OURS.findall(words):
        assert name in SERIES or name in RECORDED, (where, name)
    for name, matchers in MATCHERS.findall(expression):
        for label in re.findall(r"(\w+)\s*[=!]", matchers):
            assert label in SERIES[name].labels, (where, name, label)


def test_labels_that_are_kept_exist() -> None:
    """`by (...)` names labels of the metrics that it is used on."""
    for where, expression in expressions():
        metrics = [SERIES[name] for name in OURS.findall(expression) if name in SERIES]
        known = {label for metric in metrics for label in metric.labels} | OF_PROMETHEUS
        for group in re.findall(r"\bby\s*\(([^)]*)\)", expression):
            assert set(re.findall(r"\w+", group)) <= known, where


def test_every_metric_is_shown_somewhere() -> None:
    """No metric is collected that no dashboard, rule or alert looks at, but for the sizes of things."""
    shown = {OURS_NAME for _, expression in expressions() for OURS_NAME in OURS.findall(expression)}
    unseen = {metric.name for metric in metric_names.ALL if not shown & set(metric.series)}
    assert unseen <= {"headrace.tokenizer.tokens"}


def test_dashboards_are_what_the_code_writes() -> None:
    """The files are up to date: `make dashboards`."""
    for file, text in dashboards.texts().items():
        assert file.read_text(encoding="utf-8") == text, file.name


def test_what_the_issue_asks_for_has_an_alert() -> None:
    """First token, queue, KV, preemptions, dropped spans, errors."""
    alerts = " ".join(rule["expr"] for rule in RULES if "alert" in rule)
    for word in (
        "time_to_first_token",
        "waiting",
        "kv:used_ratio > 0.95",
        "preemptions",
        "spans_dropped",
        "error_ratio",
    ):
        assert word in alerts


def test_advice_leads_to_a_section() -> None:
    """Each alert's advice is a heading of the document it names."""
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for rule in RULES:
        if "alert" in rule:
            file, _, anchor = rule["annotations"]["advice"].partition("#")
            assert file == "docs/troubleshooting.md"
            assert anchor in anchors, (rule["alert"], anchor)


def test_the_document_names_what_exists() -> None:
    """Metrics, attributes, spans and settings in docs/troubleshooting.md are real."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    words = set(re.findall(r"`([^`]*)`", text))
    bases = {name for metric in metric_names.ALL for name in (*metric.series, metric.prometheus)}
    spoken = {value for value in vars(names).values() if isinstance(value, str)}
    settings = {
        name
        for cls, section in (
            (GatewaySettings, "gateway"),
            (StreamSettings, "stream"),
            (EngineProcessSettings, "engine"),
        )
        for name in describe(cls(), section)
    }
    for word in words:
        name = re.split(r"[{ :]", word.replace("headrace:", "headrace_recorded_"))[0]
        if word.startswith("headrace:"):
            assert word in RECORDED, word
        elif name.startswith(("headrace_", "gen_ai_", "process_", "rpc_")):
            assert name in bases, word
        elif name.startswith("HEADRACE_"):
            assert name in settings, word
        elif name.startswith(("headrace.", "engine.", "stream.", "tokenizer.", "gateway.")):
            assert name in spoken, word


@NEEDS_PROMTOOL
def test_prometheus_accepts_the_rules() -> None:
    """`promtool check`: rules and configuration are valid."""
    for arguments in (["rules", *map(str, PLACE.glob("*.rules.yml"))], ["config", str(PLACE / "prometheus.yml")]):
        done = subprocess.run([str(PROMTOOL), "check", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_PROMTOOL
def test_alerts_fire_when_they_should() -> None:
    """`promtool test rules` on rules.test.yml."""
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "rules.test.yml"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
