"""Writes the Grafana dashboards beside this file: `python -m deploy.observability.dashboards` (or `make dashboards`).

Expressions are made from `metric_names`, so that a metric that is renamed or gone is an error here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common import metric_names as m
from services.common.metric_names import Metric

HERE = Path(__file__).parent / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${source}"}
COLUMNS, WIDTH, HEIGHT = 3, 8, 8


@dataclass(frozen=True)
class Panel:
    """One panel: a title that is the question, a unit of Grafana's, and (expression, legend) pairs."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    kind: str = "timeseries"
    stacked: bool = False


def rate(metric: Metric, *by: str, where: str = "", suffix: str = "") -> str:
    """Per second, added up over processes, by labels."""
    name = metric.prometheus + suffix if suffix else metric.series[0]
    chosen = f"{{{where}}}" if where else ""
    group = f" by ({', '.join(by)})" if by else ""
    return f"sum{group} (rate({name}{chosen}[$__rate_interval]))"


def quantile(share: float, metric: Metric, *by: str) -> str:
    """A percentile: buckets are added up first."""
    return f"histogram_quantile({share}, {rate(metric, 'le', *by)})"


def percentiles(metric: Metric) -> list[tuple[str, str]]:
    """Median, 95th and 99th."""
    return [(quantile(share, metric), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)]


def gauge(metric: Metric, *by: str, where: str = "") -> str:
    """The present value, added up over processes."""
    chosen = f"{{{where}}}" if where else ""
    group = f" by ({', '.join(by)})" if by else ""
    return f"sum{group} ({metric.series[0]}{chosen})"


SERVING = [
    Panel("Time to first token", "s", percentiles(m.TIME_TO_FIRST_TOKEN)),
    Panel("Time per output token", "s", percentiles(m.TIME_PER_OUTPUT_TOKEN)),
    Panel("Whole request", "s", percentiles(m.REQUEST_DURATION)),
    Panel("Requests by outcome", "reqps", [(rate(m.REQUESTS, "outcome"), "{{outcome}}")], stacked=True),
    Panel("Share of requests that fail through us", "percentunit", [("headrace:requests:error_ratio", "errors")]),
    Panel("Tokens", "short", [(rate(m.TOKENS, "kind"), "{{kind}} a second")]),
    Panel("Requests in the engines", "short", [(gauge(m.SEQUENCES, "state"), "{{state}}")], stacked=True),
    Panel("Prefill that waits", "s", [("headrace:backlog:seconds", "backlog")]),
    Panel(
        "Places in the gateway",
        "short",
        [
            (gauge(m.REQUESTS_OPEN), "open"),
            (gauge(m.REQUESTS_OPEN_LIMIT), "most"),
            (gauge(m.REQUESTS_QUEUED, "priority"), "{{priority}} waiting"),
        ],
    ),
    Panel(
        "KV blocks in use",
        "percentunit",
        [
            ("headrace:kv:used_ratio", "{{instance}}"),
            ("headrace:kv:wasted_ratio", "{{instance}}: of these, without a token"),
        ],
    ),
    Panel("Prompt tokens found in the prefix cache", "percentunit", [("headrace:prefix:hit_ratio", "hits")]),
    Panel(
        "Preemptions",
        "short",
        [(rate(m.PREEMPTIONS), "a second"), (rate(m.RECOMPUTED), "tokens computed again a second")],
    ),
    Panel(
        "Guessed tokens",
        "short",
        [(rate(m.DRAFTED), "computed ahead a second"), (rate(m.ACCEPTED), "of these right")],
    ),
    Panel(
        "Engine busy",
        "percentunit",
        [
            ("headrace:step:busy_ratio", "{{instance}}"),
            ("headrace:host:gap_ratio", "{{instance}}: waits for the host"),
        ],
    ),
    Panel("Headroom: places and KV blocks left", "percentunit", [("headrace:headroom:ratio", "{{instance}}")]),
    Panel("Tokens by tenant", "short", [(rate(m.TOKENS, "tenant", where='kind="completion"'), "{{tenant}} a second")]),
    Panel("Refused by quotas", "reqps", [(rate(m.QUOTA_REFUSED, "tenant", "limit"), "{{tenant}}: {{limit}}")]),
    Panel("Cost of a million tokens", "short", [("headrace:completion_tokens:cost_per_million", "cost")]),
]
REQUESTS = [
    Panel("Where the time goes", "percentunit", [("headrace:stage:share", "{{stage}}")], stacked=True),
    Panel("Each stage, p99", "s", [("headrace:stage_duration_seconds:p99", "{{stage}}")]),
    Panel("Time to first token, with traces", "s", [(rate(m.TIME_TO_FIRST_TOKEN, "le"), "{{le}}")], kind="heatmap"),
    Panel(
        "Time to first token by prompt, p99",
        "s",
        [(quantile(0.99, m.TIME_TO_FIRST_TOKEN, "prompt_length"), "{{prompt_length}}")],
    ),
    Panel(
        "Time per token by prompt, p99",
        "s",
        [(quantile(0.99, m.TIME_PER_OUTPUT_TOKEN, "prompt_length"), "{{prompt_length}}")],
    ),
    Panel(
        "Whole request by prompt, p99",
        "s",
        [("headrace:request_duration_seconds:by_length:p99", "{{prompt_length}}")],
    ),
    Panel("In the engine's queue by reason, p99", "s", [("headrace:queue_duration_seconds:p99", "{{reason}}")]),
    Panel("Between two tokens", "s", percentiles(m.INTER_TOKEN)),
    Panel(
        "Between two tokens by prompt, p99",
        "s",
        [("headrace:inter_token_duration_seconds:by_length:p99", "{{prompt_length}}")],
    ),
    Panel(
        "Time lost while generating",
        "s",
        [
            (rate(m.STALLED), "stalled by prefill"),
            (rate(m.PAUSED), "paused by readers"),
            (rate(m.PREEMPTED), "preempted"),
        ],
    ),
    Panel(
        "One step",
        "s",
        [
            ("headrace:step_duration_seconds:p99", "{{kind}} p99"),
            ("headrace:step_duration_seconds:p50", "{{kind}} p50"),
        ],
    ),
    Panel("From one step's computing to the next one's", "s", percentiles(m.HOST_GAP)),
    Panel(
        "Tokenizer",
        "s",
        [
            (quantile(0.99, m.TOKENIZER_WAIT), "waiting p99"),
            (quantile(0.99, m.TOKENIZER_ENCODE), "encoding p99"),
        ],
    ),
    Panel(
        "Inputs encoded together",
        "short",
        [(quantile(0.5, m.TOKENIZER_BATCH), "median"), (gauge(m.TOKENIZER_WAITING), "waiting now")],
    ),
    Panel(
        "Stream process",
        "s",
        [(rate(m.STREAM_BLOCKED), "blocked in writes"), (rate(m.STREAM_DETOKENIZE), "busy with text")],
    ),
    Panel(
        "Sequences a step", "short", [(quantile(0.5, m.STEP_SEQUENCES), "median"), (gauge(m.SEQUENCES_LIMIT), "most")]
    ),
    Panel("Tokens a step", "short", [(quantile(0.5, m.STEP_TOKENS, "kind"), "{{kind}} median")]),
    Panel(
        "Messages and tokens of the streams",
        "short",
        [
            (rate(m.STREAM_MESSAGES), "messages a second"),
            (rate(m.STREAM_TOKENS), "tokens a second"),
            (gauge(m.STREAM_OPEN), "open now"),
        ],
    ),
]
SELF = [
    Panel("Processor time", "percentunit", [(rate(m.CPU_TIME, "process", "instance"), "{{process}} {{instance}}")]),
    Panel("Memory", "bytes", [(gauge(m.MEMORY, "process", "instance"), "{{process}} {{instance}}")]),
    Panel("Event loop: time until a call is taken up, p99", "s", [("headrace:loop_lag_seconds:p99", "{{instance}}")]),
    Panel("Calls, p99", "s", [(quantile(0.99, m.CALL_DURATION, "rpc_method"), "{{rpc_method}}")]),
    Panel(
        "Calls by status",
        "reqps",
        [(rate(m.CALL_DURATION, "rpc_response_status_code", suffix="_count"), "{{rpc_response_status_code}}")],
    ),
    Panel("Calls at work", "short", [(gauge(m.CALLS_OPEN, "process"), "{{process}}")]),
    Panel(
        "Spans",
        "short",
        [
            (rate(m.SPANS_STARTED), "started a second"),
            (rate(m.SPANS_EXPORTED), "exported a second"),
            (rate(m.SPANS_DROPPED), "dropped a second"),
        ],
    ),
    Panel("Spans not ended", "short", [(f"{gauge(m.SPANS_STARTED)} - {gauge(m.SPANS_ENDED)}", "open")]),
    Panel(
        "Log lines",
        "short",
        [
            (rate(m.LOGS_WRITTEN), "written a second"),
            (rate(m.LOGS_DROPPED), "dropped a second"),
            (rate(m.LOGS_SAMPLED_OUT), "not chosen a second"),
        ],
    ),
    Panel("Waiting for the machine", "percentunit", [(f"max by (resource) ({m.PRESSURE.prometheus})", "{{resource}}")]),
    Panel("Processor time that others took", "percentunit", [(rate(m.STEAL, "instance"), "{{instance}}")]),
    Panel("Threads", "short", [(gauge(m.THREADS, "process"), "{{process}}")]),
    Panel(
        "Engines that are routed to",
        "short",
        [
            (f"min by (engine) ({m.ENGINE_SERVING.prometheus})", "{{engine}}"),
            (gauge(m.ENGINE_REQUESTS, "engine"), "requests on {{engine}}"),
        ],
    ),
    Panel("Engines lost", "short", [(rate(m.STREAM_ENGINES_LOST), "a second")]),
    Panel("Memory of the model", "bytes", [(gauge(m.MODEL_MEMORY, "part"), "{{part}}")]),
    Panel("GPUs busy", "percentunit", [(m.GPU_UTILIZATION.prometheus, "{{instance}} {{gpu}}")]),
    Panel(
        "Memory of GPUs",
        "bytes",
        [
            (m.GPU_MEMORY.prometheus, "{{instance}} {{gpu}}"),
            (m.GPU_MEMORY_LIMIT.prometheus, "{{instance}} {{gpu}}: all of it"),
        ],
    ),
    Panel("Clocks of GPUs", "hertz", [(m.GPU_CLOCK.prometheus, "{{instance}} {{gpu}}")]),
    Panel("Power of GPUs", "watt", [(m.GPU_POWER.prometheus, "{{instance}} {{gpu}}")]),
    Panel("GPUs held down", "short", [(m.GPU_THROTTLED.prometheus, "{{instance}} {{gpu}}: {{cause}}")]),
    Panel("Memory of the engine's allocator", "bytes", [(gauge(m.ALLOCATOR_MEMORY, "state"), "{{state}}")]),
]
DASHBOARDS = {
    "serving": ("Headrace: serving", "What callers get, and what it costs.", SERVING),
    "requests": ("Headrace: requests", "Where the time of requests goes.", REQUESTS),
    "self": ("Headrace: self", "The processes, the machine, and telemetry itself.", SELF),
}


def dashboard(uid: str, title: str, about: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """A dashboard as Grafana imports it."""
    return {
        "uid": f"headrace-{uid}",
        "title": title,
        "description": about,
        "tags": ["headrace"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    custom = {"fillOpacity": 30 if panel.stacked else 5, "showPoints": "never", "lineWidth": 1}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"x": number % COLUMNS * WIDTH, "y": number // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "exemplar": panel.kind == "heatmap",
                "format": "heatmap" if panel.kind == "heatmap" else "time_series",
            }
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }


def texts() -> dict[Path, str]:
    """Every file and what belongs into it."""
    return {
        HERE / f"{uid}.json": json.dumps(dashboard(uid, *rest), indent=1) + "\n" for uid, rest in DASHBOARDS.items()
    }


if __name__ == "__main__":
    for file, text in texts().items():
        file.write_text(text, encoding="utf-8")
