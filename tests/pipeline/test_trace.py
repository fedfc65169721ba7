"""One request is one trace across four processes, and its receipt sums."""

from __future__ import annotations

import time

import pytest

RPC = "headrace.v1."
# Every expected edge: (service, parent span) → (service, child span).
EDGES = {
    (("gateway", RPC + "GatewayService/GenerateStream"), ("gateway", "gateway.admit")),
    (("gateway", RPC + "GatewayService/GenerateStream"), ("gateway", RPC + "TokenizerService/Encode")),
    (("gateway", RPC + "TokenizerService/Encode"), ("tokenizer", RPC + "TokenizerService/Encode")),
    (("tokenizer", RPC + "TokenizerService/Encode"), ("tokenizer", "tokenizer.wait")),
    (("tokenizer", RPC + "TokenizerService/Encode"), ("tokenizer", "tokenizer.encode")),
    (("gateway", RPC + "GatewayService/GenerateStream"), ("gateway", "gateway.route")),
    (("gateway", RPC + "GatewayService/GenerateStream"), ("gateway", RPC + "StreamService/Deliver")),
    (("gateway", RPC + "StreamService/Deliver"), ("stream", RPC + "StreamService/Deliver")),
    (("stream", RPC + "StreamService/Deliver"), ("engine", "engine.request")),
    (("stream", RPC + "StreamService/Deliver"), ("stream", "stream.detokenize")),
    (("stream", RPC + "StreamService/Deliver"), ("stream", "stream.send")),
    (("engine", "engine.request"), ("engine", "engine.queue")),
    (("engine", "engine.request"), ("engine", "engine.prefill")),
    (("engine", "engine.request"), ("engine", "engine.decode")),
}
# What each phase says of itself, whatever it did.
ATTRIBUTES = {
    "gateway.admit": {"headrace.admit.open_requests", "headrace.admit.queued_requests", "headrace.admit.result"},
    "gateway.route": {"headrace.engine.address", "headrace.route.predicted_cached_tokens"},
    "tokenizer.wait": {"headrace.tokenizer.batch_size"},
    "tokenizer.encode": {"headrace.tokenizer.characters", "headrace.tokens"},
    "engine.queue": {"headrace.queue.reason"},
    "engine.prefill": {"headrace.tokens", "headrace.cached_tokens", "headrace.prefill.chunks"},
    "engine.decode": {
        "headrace.decode.steps",
        "headrace.decode.inter_token_p50_ms",
        "headrace.decode.inter_token_p99_ms",
        "headrace.decode.inter_token_max_ms",
        "headrace.decode.stalled_ms",
    },
    "stream.detokenize": {"headrace.detokenize.busy_ms", "headrace.detokenize.calls"},
    "stream.send": {
        "headrace.send.messages",
        "headrace.send.bytes",
        "headrace.send.blocked_ms",
        "headrace.send.tail_ms",
    },
}
SEQUENTIAL = ("admit", "tokenize", "route", "transit", "queue", "prefill", "first_delivery")


def edges_of(spans):
    by_id = {span.span_id: span for span in spans}
    named = {span.span_id: (span.service.removeprefix("headrace-"), span.name) for span in spans}
    return {(named[s.parent_id], named[s.span_id]) for s in spans if s.parent_id in by_id}


def test_every_expected_edge_and_no_other(pipeline):
    """A streamed chat gives exactly the expected parent → child edges, in one trace, as a real receiver got them."""
    with pipeline.client() as client:
        answer = client.stream(messages=[("user", "Say hello.")], temperature=0, max_tokens=8).read_all()
    spans = pipeline.receiver.wait_for(answer.trace_id, lambda spans: edges_of(spans) >= EDGES)
    assert edges_of(spans) == EDGES
    assert len([span for span in spans if not span.parent_id]) == 1
    assert all(span.end_ns >= span.start_ns and span.status != 2 for span in spans)
    root = next(span for span in spans if not span.parent_id)
    assert root.attributes["gen_ai.usage.output_tokens"] == answer.usage.completion_token_count
    assert root.attributes["gen_ai.request.temperature"] == 0
    assert not any("gen_ai.usage.input_tokens" in span.attributes for span in spans if span is not root)
    by_name = {span.name: span.attributes for span in spans}
    for name, expected in ATTRIBUTES.items():
        assert expected <= by_name[name].keys(), name
    assert by_name["tokenizer.encode"]["headrace.tokenizer.characters"] == len("Say hello.")
    assert by_name["stream.detokenize"]["headrace.detokenize.calls"] == answer.usage.completion_token_count
    assert by_name["stream.send"]["headrace.send.bytes"] > len(answer.text)


def test_the_callers_trace_is_continued(pipeline):
    """A caller's traceparent becomes the parent of the root span."""
    trace_id, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with pipeline.client() as client:
        headers = {"traceparent": f"00-{trace_id}-{caller}-01"}
        answer = client.generate("Hi", max_tokens=2, headers=headers)
    assert answer.trace_id == trace_id
    spans = pipeline.receiver.wait_for(trace_id, lambda spans: any(s.parent_id == caller for s in spans))
    assert [span.name for span in spans if span.parent_id == caller] == [RPC + "GatewayService/Generate"]


@pytest.mark.parametrize("streamed", [True, False])
def test_the_receipt_sums(pipeline, streamed):
    """Stages sum to the time to first token, and with decode and tail to the whole, within max(2 ms, 2 %)."""
    with pipeline.client() as client:
        began = time.monotonic_ns()
        question = {"messages": [("user", "Count to ten.")], "temperature": 0, "max_tokens": 24}
        answer = client.stream(**question).read_all() if streamed else client.generate(**question)
        wall_ns = time.monotonic_ns() - began
    timings = answer.timings
    allowed_ns = max(2e6, 0.02 * timings.total_ns)
    stages_ns = sum(getattr(timings, f"{stage}_ns") for stage in SEQUENTIAL)
    assert abs(timings.time_to_first_token_ns - stages_ns) <= allowed_ns
    assert abs(timings.residual_ns) <= allowed_ns
    explained = timings.time_to_first_token_ns + timings.decode_ns + timings.tail_ns
    assert abs(timings.total_ns - explained) <= allowed_ns
    assert timings.total_ns <= wall_ns <= timings.total_ns + 20e6
    assert all(getattr(timings, f"{stage}_ns") >= 0 for stage in SEQUENTIAL)
    assert timings.computed_token_count + timings.cached_token_count == answer.usage.prompt_token_count
    assert timings.decode_step_count + timings.accepted_token_count == answer.usage.completion_token_count
    assert timings.accepted_token_count <= timings.drafted_token_count


def test_a_refused_request_marks_only_the_phase_that_failed(pipeline):
    """A refused number fails gateway.admit and the root; no later phase is invented."""
    trace_id = "1af7651916cd43dd8448eb211c80319c"
    with pipeline.client() as client, pytest.raises(Exception, match="temperature"):
        client.generate("Hi", temperature=-1, headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"})
    spans = pipeline.receiver.wait_for(trace_id, lambda spans: len(spans) >= 2)
    assert {span.name for span in spans} == {RPC + "GatewayService/Generate", "gateway.admit"}
    assert all(span.status == 2 for span in spans)
