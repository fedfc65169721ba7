"""Guarantees of the workloads and of the run through a gateway."""

import hashlib
import itertools
import json
from pathlib import Path

import pytest

from headrace import errors
from headrace.bench import gaps, results, steps, through, workloads
from headrace.bench.in_process import EngineBench
from headrace.bench.workloads import Item
from headrace.cli import bench_gaps, bench_steps
from tests.headrace.scripted_gateway import ScriptedGateway, serving

W1_SHA256 = "1713c6a05263b0528645cad6c2f3bae1a56655048414fa34552d48f9c8f0bbd7"
W2_SHA256 = "368b3600b726bb4748e67f921c71a2e3ff5c10df12da27dfdc3a39c5893d6459"


def sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()


def as_plain(item: Item) -> dict[str, object]:
    return {"prompt": list(item.prompt), "output": item.output}


def test_workloads_are_pinned() -> None:
    """The ids are the same on every machine and in every version."""
    assert sha256([as_plain(chain[0]) for chain in workloads.w1()]) == W1_SHA256
    assert sha256([[as_plain(item) for item in chain] for chain in workloads.w2()]) == W2_SHA256


def test_counts() -> None:
    """W1: 48 requests, 9,795 prompt and 2,582 output tokens. W2: each turn starts with the one before."""
    assert workloads.counts(workloads.get("w1")) == (48, 9795, 2582)
    assert workloads.counts(workloads.get("w2"))[0] == 24
    for chain in workloads.get("w2"):
        for before, after in itertools.pairwise(chain):
            assert after.prompt[: len(before.prompt)] == before.prompt


WORKLOAD = [[Item((1, 2), 3), Item((1, 2, 3), 3)], [Item((4,), 3)]]


async def test_through_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every item is streamed greedily as token ids to its full length; times and tokens add up."""
    gateway = ScriptedGateway()
    gateway.finish = "length"
    ticks: list[int] = []
    async with serving(gateway) as target:
        run = await through.run(target, WORKLOAD, 2, ticks.append)
    asked = [request.generation for request in gateway.requests if hasattr(request, "generation")]
    assert sorted(tuple(generation.token_ids.ids) for generation in asked) == [(1, 2), (1, 2, 3), (4,)]
    assert all(generation.stop.ignore_eos and generation.sampling.temperature == 0 for generation in asked)
    assert (run.output_tokens, len(run.first_token_s), ticks[-1]) == (9, 3, 9)
    assert run.output_tokens_per_s == pytest.approx(9 / run.seconds)


async def test_an_answer_that_is_too_short_is_no_measurement() -> None:
    """A request that ends before its length fails the run."""
    async with serving(ScriptedGateway()) as target:
        with pytest.raises(results.RunFailed, match="stop after 3 of 3"):
            await through.run(target, WORKLOAD, 2)


async def test_a_failed_call_is_no_measurement() -> None:
    """A call that fails fails the run with its name."""
    gateway = ScriptedGateway()
    gateway.error = errors.ResourceExhausted("full")
    async with serving(gateway) as target:
        with pytest.raises(results.RunFailed, match="ResourceExhausted: full"):
            await through.run(target, WORKLOAD, 2)


def test_engine_in_process(default_model_dir: Path) -> None:
    """The engine generates every item to its length; a turn finds the one before in the cache, a pass finds nothing."""
    bench = EngineBench({"HEADRACE_ENGINE_KV_BLOCKS": "16", "HEADRACE_ENGINE_MAX_NUM_SEQS": "2"})
    system = tuple(range(1000, 1032))
    workload = [[Item(system, 3), Item((*system, 7, 8), 2)], [Item((5, 6), 4)]]
    ticks: list[int] = []
    first, second = bench.run(workload, ticks.append), bench.run(workload)
    assert (first.prompt_tokens, first.output_tokens, ticks[-1]) == (68, 9, 9)
    assert first.cached_tokens == second.cached_tokens == 32
    assert len(first.first_token_s) == len(first.between_tokens_s) == 3
    assert all(0 < wait < first.seconds for wait in first.first_token_s)
    assert bench.engine.stats().running_count == 0


def test_prefix_cache_kept_reset_and_off(default_model_dir: Path) -> None:
    """Kept, a turn finds the one before; reset and off, nothing of it; the next pass is as the first."""
    bench = EngineBench({"HEADRACE_ENGINE_KV_BLOCKS": "16", "HEADRACE_ENGINE_MAX_NUM_SEQS": "2"})
    system = tuple(range(1000, 1032))
    workload = [[Item(system, 3), Item((*system, 7, 8), 2)]]
    cached = [bench.run(workload, prefix_cache=mode).cached_tokens for mode in ("kept", "reset", "off", "kept")]
    assert cached == [32, 0, 0, 32]


def test_interleaved_passes_are_compared_in_pairs() -> None:
    """The ratio is of neighbours, so that a slow phase of the machine falls out of it."""

    def passes(*seconds: float) -> list[results.Run]:
        return [results.Run(one, 10, 0, 10, [0.1]) for one in seconds]

    found = results.compared({"kept": passes(1, 10, 2), "off": passes(1.5, 15, 3)})
    assert found["kept"]["ratio"] == 1
    assert (found["off"]["ratio"], found["off"]["seconds"]) == (1.5, 3)


def test_gaps(default_model_dir: Path) -> None:
    """Two streams and a prompt of 100: in chunks of 32 it takes four steps; the engine is left idle."""
    variables = {"HEADRACE_ENGINE_KV_BLOCKS": "64", "HEADRACE_ENGINE_MAX_MODEL_LEN": "256"}
    bench = EngineBench({**variables, **gaps.ONE_TOKEN_A_STEP})
    measured = gaps.measure(bench, 2, 100, seed=0)
    assert measured["steps"] == 4
    assert 0 < measured["steady_ms"] <= measured["first_token_ms"]
    stats = bench.engine.stats()
    assert (stats.running_count, stats.kv_block_free + stats.kv_block_cached) == (0, 64)
    drawn = bench_gaps.table({"streams": 2, "prompt_tokens": 100, "profiles": {"interactive": [measured]}})
    assert drawn.row_count == 1


def test_steps(default_model_dir: Path) -> None:
    """Each way of sampling: the parts are inside the step, the model's most of all; the engine is left idle."""
    variables = {"HEADRACE_ENGINE_KV_BLOCKS": "64", "HEADRACE_ENGINE_MAX_MODEL_LEN": "256"}
    bench = EngineBench({**variables, **gaps.ONE_TOKEN_A_STEP})
    clock = steps.StepClock(bench)
    lines = []
    for way in steps.SAMPLINGS:
        measured = clock.measure(2, way, 3)
        assert len(measured) == 3
        assert all(sampler > 0 and sampler + model < step for step, model, sampler in measured)
        lines.append(steps.summary(2, way, measured))
        assert 0 < lines[-1]["sampler_ms"]["p50"] < lines[-1]["host_ms"]["p50"] < lines[-1]["step_ms"]["p50"]
    stats = bench.engine.stats()
    assert (stats.running_count, stats.kv_block_free + stats.kv_block_cached) == (0, 64)
    assert bench_steps.table({"steps": lines}).row_count == len(steps.SAMPLINGS)


def test_bad_engine_setting() -> None:
    """A bad setting of the engine is told by its variable."""
    with pytest.raises(ValueError, match="HEADRACE_ENGINE_BLOCK_SIZE"):
        EngineBench({"HEADRACE_ENGINE_BLOCK_SIZE": "7"})
