"""Guarantees of the bench of the hops: what is counted, and that the engine in it is a null one."""

import os
import time
from pathlib import Path

import pytest

from headrace import errors
from headrace.bench import hops, null_engine
from headrace.bench.results import RunFailed
from headrace.cli import __main__ as command
from headrace.cli import bench_hops, output, pipeline
from headrace.v1 import generation_pb2
from services.engine.facts import facts_of
from services.engine.request import Request, RequestRefused
from tests.headrace.scripted_gateway import ScriptedGateway, serving

OWN = {"bench": os.getpid()}


@pytest.mark.parametrize("kind", hops.KINDS)
async def test_counts_what_clients_are_given(kind: str) -> None:
    """Tokens, messages and CPU time are those of the window; every window has its own."""
    gateway = ScriptedGateway()
    gateway.endless = True
    async with serving(gateway) as target:
        first, second = await hops.measure(target, OWN, streams=2, seconds=0.1, repeat=2, kind=kind)
    for one in (first, second):
        assert one.tokens == one.messages > 0
        assert 0 < one.cpu_s["bench"] < one.seconds * (os.cpu_count() or 1)
    made = hops.report([first, second], 4)
    cheaper, dearer = sorted(one.total_us_a_token for one in (first, second))
    assert cheaper <= made["us_a_token"]["total"] <= dearer
    assert len(made["passes"]) == 2


async def test_a_failed_call_is_no_measurement() -> None:
    """A call that fails, or ends, fails the run."""
    gateway = ScriptedGateway()
    async with serving(gateway) as target:
        with pytest.raises(RunFailed, match="ended while it was measured"):
            await hops.measure(target, OWN, streams=1, seconds=5, repeat=1)
        gateway.error = errors.ResourceExhausted("full")
        with pytest.raises(RunFailed, match="ResourceExhausted: full"):
            await hops.measure(target, OWN, streams=1, seconds=5, repeat=1)


def test_null_engine() -> None:
    """It gives a token a step at the rate, obeys credits, ends at max_tokens, and refuses what no engine can run."""
    engine = null_engine.NullEngine(tokens_per_s=1000)
    engine.add(Request(1, [5, 6], max_tokens=3, credit_limit=2))
    begun = time.monotonic()
    outputs = [engine.step().outputs[0] for _ in range(2)]
    assert time.monotonic() - begun >= 0.001
    assert outputs[0].usage is not None
    assert not engine.runnable
    engine.grant(1, 5)
    (last,) = engine.step().outputs
    assert last.finish is not None
    assert (last.finish.value, last.usage.output_token_count if last.usage else 0) == ("length", 3)
    assert not engine.has_work
    engine.add(Request(2, [5]))
    engine.abort_all()
    (ended,) = engine.step().outputs
    assert ended.finish is not None
    assert ended.finish.value == "cancelled"
    with pytest.raises(RequestRefused):
        engine.add(Request(3, []))


def test_the_null_engine_says_of_itself_what_an_engine_says() -> None:
    """Everything that GetEngine asks an engine for."""
    facts = facts_of(null_engine.NullEngine(tokens_per_s=1000), "null", generation_pb2.SamplingParameters())  # type: ignore[arg-type]
    assert (facts.architecture, facts.context_length) == ("NullEngine", null_engine.CONTEXT_LENGTH)


def test_through_the_real_processes(default_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real gateway, tokenizer and stream process around the null engine; messages are as full as was asked for."""
    arguments = ["--coalesce", "2", "--streams", "3", "--rate", "300", "--seconds", "0.5", "--repeat", "1"]
    assert command.main(["bench", "hops", *arguments]) == output.OK
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("CPU µs a token, 3 streams (stream)")
    row = printed[-1].split()
    assert float(row[0]) == pytest.approx(2, abs=0.3)
    assert float(row[4]) == pytest.approx(sum(map(float, row[1:4])), abs=0.3)


def test_modules_take_the_place_of_services() -> None:
    """A process can be another module; the rest stays as it is."""
    options = pipeline.PipelineOptions(ports=dict.fromkeys(pipeline.PORTS, 0), modules={"engine": "some.module"})
    programs = {program.name: program.command for program in pipeline.plan(options, {}).programs}
    assert programs["engine"][-1] == "some.module"
    assert programs["stream"][-1] == "services.stream"


def test_table() -> None:
    """One line for each number of tokens a message."""
    one = hops.Pass(1.0, 1000, 250, {"gateway": 0.04, "stream": 0.05, "engine": 0.02})
    report = {"streams": 32, "kind": "stream", "runs": [hops.report([one], 4)]}
    assert bench_hops.table(report).row_count == 1
    assert one.total_us_a_token == pytest.approx(110)
