"""A delay in one stage shows in that stage and no other: in the receipt, in the trace, and in the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.cli.pipeline import PipelineOptions, running
from tests.pipeline import delayed, scraping
from tests.pipeline.conftest import PROCESSES, Pipeline

DELAY_MS = 50.0
TIMES = 6
RPC = "headrace.v1."
# Where a trace shows each stage: a span that gets longer by itself, without what lies below it; or, where a span lasts
# as long as others' work does, what it says of its own.
SPAN = {
    "admit": "gateway.admit [gateway]",
    "tokenize": "tokenizer.encode [tokenizer]",
    "route": "gateway.route [gateway]",
    "transit": f"{RPC}TokenizerService/Encode [gateway]",
    "queue": "engine.queue [engine]",
    "prefill": "engine.prefill [engine]",
    "first_delivery": "headrace.send.first_ms",
    "decode": "engine.decode [engine]",
    "tail": "headrace.send.tail_ms",
}


@dataclass
class Delayed(Pipeline):
    """A pipeline whose stages can be slowed down, one at a time."""

    file: Path

    def slow_down(self, stage: str) -> None:
        self.file.write_text(f"{stage} {DELAY_MS / 1000}" if stage else "")


@pytest.fixture(scope="module")
def slow_pipeline(default_model_dir, receiver, tmp_path_factory) -> Iterator[Delayed]:
    file = tmp_path_factory.mktemp("delays") / "stage"
    file.write_text("")
    settings = {
        "HEADRACE_ENGINE_DTYPE": "float32",
        "HEADRACE_ENGINE_KV_BLOCKS": "1024",
        "HEADRACE_ENGINE_PREFIX_CACHE": "false",
        "HEADRACE_TRACE_ENDPOINT": receiver.endpoint,
        **{f"HEADRACE_{name}": port for name, port in scraping.endpoints().items()},
        "DELAYS_FILE": str(file),
    }
    options = PipelineOptions(
        variables=settings,
        ports=dict.fromkeys(PROCESSES, 0),
        modules={name: f"tests.pipeline.delayed.{name}" for name in PROCESSES},
    )
    with running(options, timeout_s=60) as (plan, supervisor):
        yield Delayed(plan, supervisor, receiver, file)


def ask(pipeline: Delayed, client, stage: str):
    """One request with a stage slowed down ("": none): stages of its receipt in ms, and its trace id."""
    pipeline.slow_down(stage)
    answer = client.stream("Say hello to the world.", temperature=0, max_tokens=4, ignore_eos=True).read_all()
    return {name: getattr(answer.timings, f"{name}_ns") / 1e6 for name in delayed.STAGES}, answer.trace_id


def told(pipeline: Delayed, trace_ids) -> list[dict[str, float]]:
    """What each trace says, in ms."""
    return [own_ms(pipeline.receiver.wait_for(one, lambda spans: len(spans) >= 15)) for one in trace_ids]


def own_ms(trace) -> dict[str, float]:
    """Milliseconds of each span less those of its children; of the stream process what its spans say."""
    found = {}
    for span in trace:
        if span.name in ("stream.detokenize", "stream.send"):
            found |= {name: value for name, value in span.attributes.items() if name.endswith("_ms")}
            continue
        covered, last = 0, span.start_ns
        for child in sorted((s for s in trace if s.parent_id == span.span_id), key=lambda s: s.start_ns):
            start, end = max(child.start_ns, last), min(child.end_ns, span.end_ns)
            covered += max(0, end - start)
            last = max(last, end)
        name = f"{span.name} [{span.service.removeprefix('headrace-')}]"
        found[name] = (span.end_ns - span.start_ns - covered) / 1e6
    return found


def least(samples) -> dict[str, float]:
    """The least of each: what the machine does beside only adds."""
    return {name: min(sample[name] for sample in samples) for name in samples[0]}


def grown(before: dict[str, float], after: dict[str, float]) -> set[str]:
    return {name for name in before if after[name] - before[name] > 0.8 * DELAY_MS}


@pytest.mark.parametrize("stage", delayed.STAGES)
def test_a_delay_shows_in_its_stage_and_no_other(slow_pipeline, stage):
    """50 ms in one stage: that stage of the receipt, its span and its metric grow by as much, and nothing else does."""
    gateway = slow_pipeline.plan.metrics["gateway"]
    before = scraping.scrape(gateway)
    with slow_pipeline.client() as client:  # in turn, so that both meet the same machine
        pairs = [(ask(slow_pipeline, client, ""), ask(slow_pipeline, client, stage)) for _ in range(TIMES)]
    after = scraping.scrape(gateway)
    (usual_receipts, usual_traces), (receipts, traces) = (zip(*side, strict=True) for side in zip(*pairs, strict=True))
    assert grown(least(usual_receipts), least(receipts)) == {stage}
    assert grown(least(told(slow_pipeline, usual_traces)), least(told(slow_pipeline, traces))) == {SPAN[stage]}
    name = "headrace_stage_duration_seconds_sum"
    for one in delayed.STAGES:  # the metric says what the receipts say
        grown_ms = 1e3 * (scraping.value(after, name, stage=one) - scraping.value(before, name, stage=one))
        assert grown_ms == pytest.approx(sum(receipt[one] for receipt in (*usual_receipts, *receipts)), abs=0.1)
