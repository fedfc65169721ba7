"""Guarantees of the verdict: a run that measured its own client, or too little, concludes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headrace.bench import analysis, validity
from headrace.bench.analysis import Evidence
from headrace.bench.load.driver import Driver
from headrace.bench.load.spec import Leg, LoadSpec
from headrace.bench.load.workers import ClientUse
from headrace.bench.metrics import Slo
from headrace.bench.records import OK, Record
from tests.headrace.bench.virtual import Asked, ScriptedTarget, drive

IDLE = ClientUse(wall_s=10.0, cpu_s=1.0, lags_s=[0.0001] * 100)
SPEC = LoadSpec("open", (Leg(20.0, seconds=10.0),), arrivals="constant", output="8")


def script(_asked: Asked) -> Sequence[tuple[float, int]]:
    return [(0.05, 4), (0.05, 4)]


def good() -> list[Record]:
    return drive(SPEC, script)[0]


def problems(records: Sequence[Record], uses: Sequence[ClientUse] = (IDLE,), **more: object) -> str:
    return "; ".join(validity.check(records, uses, **more).problems)  # type: ignore[arg-type]


def test_a_good_run_is_valid() -> None:
    """Nothing to complain of, and every fact is there."""
    checks = validity.check(good(), [IDLE])
    assert (checks.verdict, checks.problems) == ("VALID", ())
    assert checks.facts["client_cpu"] == pytest.approx(0.1)


def test_a_client_without_processor_time_is_invalid() -> None:
    """A process that used 90 % of its core, or an event loop that was late."""
    assert "client CPU: a client process used 90%" in problems(good(), [IDLE, replace(IDLE, cpu_s=9.0)])
    assert "client lag" in problems(good(), [replace(IDLE, lags_s=[0.05] * 100)])


def test_prompts_that_the_server_has_seen_are_invalid() -> None:
    """A second run with the same seed finds its prompts in the prefix cache; prompts that share beginnings may."""
    seen = [replace(record, cached_tokens=record.prompt_tokens // 2) for record in good()]
    assert "prompts seen before: the prefix cache held 50% of" in problems(seen, shared=False)
    assert not problems(seen, shared=True)
    evidence = Evidence(seen, [IDLE])
    assert "use another --seed" in analysis.report(SPEC, evidence, Slo())["problems"][0]
    assert not analysis.report(replace(SPEC, shared_prefix=8), evidence, Slo())["problems"]


def test_late_sends_are_invalid() -> None:
    """P99 of the send lag, beside what is measured."""
    late = [
        replace(record, sent_s=record.intended_s + 0.03, messages=[(record.first_s + 0.03, 8)]) for record in good()
    ]
    assert "send lag: P99 30.0 ms" in problems(late)


def test_what_does_not_add_up_is_invalid() -> None:
    """Failures, token counts, residuals, lost spans, too few requests, growth."""
    records = good()
    failing = [replace(r, outcome="Unavailable", error="no engine") if i < 3 else r for i, r in enumerate(records)]
    assert "failures: 3 of 200 requests, most often Unavailable: no engine" in problems(failing)
    assert "token counts" in problems([replace(records[0], output_tokens=7), *records[1:]])
    receipt = {"total_ns": 100_000_000, "residual_ns": 2_100_000}
    assert "residual: 100.0%" in problems([replace(record, receipt=receipt) for record in records])
    usual, odd = (replace(records[0], receipt={"total_ns": 100_000_000, "residual_ns": ns}) for ns in (0, 5_000_000))
    assert not problems([odd] * 4 + [usual] * 196)  # the machine was busy for a moment
    lost = replace(records[0], receipt={"total_ns": 2_000_000_000, "residual_ns": 1_900_000_000})
    assert "residual: 0.5%" in problems([lost] + [usual] * 199)  # what made the slowest slow
    assert "dropped spans: 5" in problems(records, dropped_spans=5.0)
    assert not problems(records, dropped_spans=0.0)
    assert "too few samples: 99" in problems(records[:99])
    assert "as it says" in problems(records, steadiness=["as it says"])


def test_growing_latency_makes_the_run_invalid() -> None:
    """A server with one place and 1.2 times the work it can do."""
    free_at = 0.0

    def overloaded(asked: Asked) -> Sequence[tuple[float, int]]:
        nonlocal free_at
        free_at = max(free_at, asked.now) + 0.06
        return [(free_at - asked.now, 8)]

    records, _ = drive(SPEC, overloaded)
    report = analysis.report(SPEC, Evidence(records, [IDLE]), Slo())
    assert report["verdict"] == "INVALID"
    assert any("not steady" in problem for problem in report["problems"])


async def test_a_burnt_client_makes_the_run_invalid() -> None:
    """In real time: a client that computes 8 ms for every message cannot measure 200 messages a second."""

    class Burning(ScriptedTarget):
        def open(self, *arguments: object) -> object:  # type: ignore[override]
            stream = super().open(*arguments)  # type: ignore[arg-type]
            read = stream.read

            async def burnt() -> int | None:
                count = await read()
                until = time.perf_counter() + 0.008
                while time.perf_counter() < until:
                    pass
                return count

            stream.read = burnt  # type: ignore[method-assign]
            return stream

    spec = LoadSpec("open", (Leg(100.0, seconds=1.0),), arrivals="constant", output="8")
    driver = Driver(spec, Burning(script))  # type: ignore[arg-type]
    begun, cpu = time.monotonic(), time.process_time()
    await driver.run(begun)
    use = ClientUse(time.monotonic() - begun, time.process_time() - cpu, driver.lags_s)
    records = sorted(driver.records, key=lambda record: record.sent_s)
    report = analysis.report(spec, Evidence(records, [use]), Slo(), fewest=20)
    assert report["verdict"] == "INVALID"
    assert {OK} == {record.outcome for record in records}
    named = " ".join(report["problems"])
    assert "client lag" in named
    assert "send lag" in named
