"""However requests end, every span ends: once, in its own trace, with the right status, and receipts sum."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter, defaultdict

import pytest

from headrace import errors
from headrace.cli.supervisor import ProgramDied
from headrace.client import AsyncClient
from tests.pipeline import scraping
from tests.pipeline.conftest import PROCESSES, start_pipeline, until

PARENT = "b7ad6b7169203331"
PHASES = (
    "gateway.admit",
    "gateway.route",
    "tokenizer.wait",
    "tokenizer.encode",
    "engine.queue",
    "engine.prefill",
    "engine.decode",
    "engine.paused",
    "engine.preempted",
    "stream.detokenize",
    "stream.send",
)
REQUESTS = 200
KINDS = ("done", "stop", "cancel at once", "cancel after first", "deadline", "bad field", "unknown model", "break")


def trace_id(number: int) -> str:
    return f"{0xC0FFEE:08x}{number:024x}"


def headers(number: int) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id(number)}-{PARENT}-01"}


async def one(client: AsyncClient, number: int, kind: str, rng: random.Random):
    """Asks once; returns how it ended and the answer, if there is one."""
    options = {"temperature": 0, "max_tokens": rng.randint(2, 24), "headers": headers(number)}
    prompt = f"{number} " + "word " * rng.randint(1, 60)
    if kind == "stop":
        options["stop"] = [rng.choice(["e", " the", "\n", "a"])]
    elif kind == "deadline":
        options |= {"timeout": rng.uniform(0.2, 4), "max_tokens": 400, "ignore_eos": True}
    elif kind == "bad field":
        options["temperature"] = -1
    elif kind == "unknown model":
        options["model"] = "no-such-model"
    elif kind.startswith("cancel") or kind == "break":
        options |= {"max_tokens": 400, "ignore_eos": True}
    if kind == "done" and number % 2:
        return "ended", await client.generate(prompt, **options)
    stream = client.stream(prompt, **options)
    task = asyncio.ensure_future(read(stream, break_after=2 if kind == "break" else None))
    if kind == "cancel at once":
        await asyncio.wait({task}, timeout=rng.uniform(0.1, 3))
        task.cancel()
    elif kind == "cancel after first":
        await asyncio.wait({task, asyncio.ensure_future(stream_started(stream))}, return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return "cancelled", None
    except errors.HeadraceError as error:
        return error.reason, None
    finally:
        await stream.aclose()
    return ("cancelled", None) if kind == "break" else ("ended", stream.answer)


started: dict[int, asyncio.Event] = defaultdict(asyncio.Event)


async def stream_started(stream) -> None:
    await started[id(stream)].wait()


async def read(stream, break_after: int | None) -> None:
    seen = 0
    async for _ in stream:
        started[id(stream)].set()
        seen += 1
        if seen == break_after:
            return


def counts_of(pipeline, process: str) -> list[float]:
    """Spans of a process so far: started, ended, exported."""
    samples = scraping.scrape(pipeline.plan.metrics[process])
    return [scraping.value(samples, f"headrace_spans_{what}_total") for what in ("started", "ended", "exported")]


@pytest.fixture(scope="module")
def counted(default_model_dir, receiver):
    """A pipeline whose metrics can be read."""
    with start_pipeline(receiver, GATEWAY_MAX_OPEN_REQUESTS="400", **scraping.endpoints()) as running:
        yield running


async def test_two_hundred_random_endings(counted, receiver):
    """200 at once, ended at random: spans started == ended, own traces, one failed phase at most, receipts sum."""
    rng = random.Random(5)
    kinds = [rng.choice(KINDS) for _ in range(REQUESTS)]
    before = counted.baseline()
    async with AsyncClient(counted.target) as client:
        await client.list_models()  # the connection is there: nobody's time goes into making it
        ends = await asyncio.gather(*(one(client, n, kind, rng) for n, kind in enumerate(kinds)))
    await asyncio.to_thread(until, lambda: counted.baseline() == before, 30, "idle")

    outcomes = defaultdict(Counter)
    for kind, (how, answer) in zip(kinds, ends, strict=True):
        outcomes[kind][how] += 1
        if answer is not None:
            timings = answer.timings
            assert abs(timings.residual_ns) <= max(2e6, 0.02 * timings.total_ns), (kind, timings)
    assert set(outcomes["done"]) == set(outcomes["stop"]) == {"ended"}
    assert set(outcomes["bad field"]) == {"INVALID_FIELD"}
    assert set(outcomes["unknown model"]) == {"MODEL_NOT_FOUND"}
    assert set(outcomes["deadline"]) <= {"DEADLINE_EXCEEDED", "ended"}
    assert set(outcomes["cancel at once"]) | set(outcomes["cancel after first"]) == {"cancelled"}

    for process in PROCESSES:
        await asyncio.to_thread(
            until, lambda process=process: len(set(counts_of(counted, process))) == 1, 10, f"{process}: spans end"
        )
        assert counts_of(counted, process)[0] > 100
    traced = 0
    for number, (kind, (how, _)) in enumerate(zip(kinds, ends, strict=True)):
        spans = receiver.trace(trace_id(number))
        if not spans:  # ended before it had left the client
            assert how in ("cancelled", "DEADLINE_EXCEEDED")
            continue
        traced += 1
        check_trace(spans, kind, how)
    assert traced > 0.9 * REQUESTS


def root_is_there(spans) -> bool:
    return any(span.parent_id == PARENT for span in spans)


def check_trace(spans, kind: str, how: str) -> None:
    """The spans of one request: its own, one root, a failure in at most one phase of each process."""
    roots = [span for span in spans if span.parent_id == PARENT]
    assert len(roots) == 1, (kind, how, [s.name for s in spans])
    ids = {span.attributes["headrace.request.id"] for span in spans if "headrace.request.id" in span.attributes}
    assert len(ids) == 1, (kind, how)
    assert len({span.span_id for span in spans}) == len(spans)
    known = {span.span_id for span in spans} | {PARENT}
    assert all(span.parent_id in known for span in spans), (kind, how, [s.name for s in spans])
    failed = [span.name for span in spans if span.status == 2 and span.name in PHASES]
    root = roots[0]
    if how == "ended":
        assert [(s.service, s.name, s.attributes.get("error.type")) for s in spans if s.status == 2] == [], kind
    elif how == "cancelled":  # unless the answer was complete before the cancel came
        assert root.status != 2 or root.attributes["error.type"] == "CANCELLED", (kind, root)
    elif how == "DEADLINE_EXCEEDED":  # of a caller that counts from an earlier moment the server only sees that it left
        assert root.attributes["error.type"] in (how, "CANCELLED"), (kind, root)
    else:
        assert (root.status, root.attributes["error.type"]) == (2, how), (kind, root)
    assert len(failed) == len(set(failed)) <= 1, (kind, how, failed)


async def test_fifty_at_once_never_share_a_trace(counted, receiver):
    """50 concurrent chats with their own traceparents: each trace has the same set of spans, and its own request id."""
    first = 10_000
    async with AsyncClient(counted.target) as client:

        async def ask(number: int):
            stream = client.stream(
                messages=[("user", f"Say {number}.")],
                temperature=0,
                max_tokens=4,
                ignore_eos=True,
                headers=headers(number),
            )
            return await stream.read_all()

        answers = await asyncio.gather(*(ask(first + number) for number in range(50)))
    shapes, request_ids = set(), set()
    for number, answer in enumerate(answers):
        assert answer.trace_id == trace_id(first + number)
        spans = await asyncio.to_thread(receiver.wait_for, answer.trace_id, lambda spans: len(spans) >= 15)
        shapes.add(tuple(sorted((span.service, span.name) for span in spans)))
        (mine,) = {span.attributes["headrace.request.id"] for span in spans}
        request_ids.add(mine)
    assert len(shapes) == 1
    assert len(request_ids) == 50


async def test_a_killed_engine_leaves_no_span_open(default_model_dir, receiver):
    """The engine dies under 20 streams: the spans of the others end with PEER_LOST, in the right traces."""
    first = 20_000
    with start_pipeline(receiver, **scraping.endpoints()) as pipeline:
        async with AsyncClient(pipeline.target) as client:
            streams = [
                client.stream(f"{n} words", max_tokens=2000, ignore_eos=True, headers=headers(first + n))
                for n in range(20)
            ]
            readers = [asyncio.ensure_future(read(stream, None)) for stream in streams]
            await asyncio.gather(*(stream_started(stream) for stream in streams))
            os.kill(pipeline.supervisor.pids["engine"], signal.SIGKILL)
            with pytest.raises(ProgramDied):
                await asyncio.to_thread(pipeline.supervisor.wait, 10)
            ends = await asyncio.gather(*readers, return_exceptions=True)
            assert {getattr(end, "reason", end) for end in ends} == {"PEER_LOST"}
        for process in ("gateway", "stream", "tokenizer"):
            await asyncio.to_thread(
                until, lambda process=process: len(set(counts_of(pipeline, process))) == 1, 10, f"{process}: spans end"
            )
        for number in range(20):
            spans = await asyncio.to_thread(receiver.wait_for, trace_id(first + number), root_is_there)
            by_service = {span.service: span for span in spans if span.parent_id == PARENT or "SERVER" in span.name}
            assert by_service["headrace-gateway"].attributes["error.type"] == "PEER_LOST"
