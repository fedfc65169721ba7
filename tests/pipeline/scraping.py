"""Reads the metrics endpoints of a pipeline."""

from __future__ import annotations

import urllib.request

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from headrace.cli import ports

PROCESSES = ("gateway", "stream", "engine", "tokenizer")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def endpoints() -> dict[str, str]:
    """Settings that give each process a free port for its metrics; HEADRACE_ left out."""
    numbers = ports.free("127.0.0.1", len(PROCESSES))
    return {f"{name.upper()}_METRICS_PORT": str(number) for name, number in zip(PROCESSES, numbers, strict=True)}


def scrape(address: str) -> Samples:
    """Every sample of one process, by name and labels."""
    samples = text_string_to_metric_families(text(address))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in samples
        for sample in family.samples
    }


def text(address: str) -> str:
    """What the endpoint answers, as OpenMetrics."""
    headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
    with urllib.request.urlopen(urllib.request.Request(f"http://{address}/metrics", headers=headers)) as answer:
        return answer.read().decode()


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the samples of a name that have these labels."""
    wanted = set(labels.items())
    return sum(number for (found, its), number in samples.items() if found == name and wanted <= set(its))
