"""The edge of the tokenizer: a batch of several callers is a trace of its own, linked with each of them."""

from __future__ import annotations

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common import names
from services.common.telemetry import Telemetry, TelemetrySettings
from services.tokenizer.inputs import ChatInput, ChatMessage, TextPart
from services.tokenizer.lane import Encoded, Worked
from services.tokenizer.service import TokenizerServicer

SPOKEN = ChatInput([ChatMessage("system", "be kind"), ChatMessage("user", [TextPart("grüß "), TextPart("dich")])])


class Call:
    """What recording needs of a call."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.span = telemetry.start("Encode")
        self.arrival_ns = 10


def recorded(level: int, calls: int, inputs: int):
    """The spans of `calls` calls of `inputs` inputs each that were encoded together."""
    exporter = InMemorySpanExporter()
    telemetry = Telemetry("tokenizer", TelemetrySettings(level=level), exporter)
    servicer = TokenizerServicer("model", telemetry)
    made = [Call(telemetry) for _ in range(calls)]
    tags = [call.span for call in made for _ in range(inputs)]
    batch = servicer._batched(tags, Worked([[1]] * len(tags), 20, 30))
    for call in made:
        servicer._record([SPOKEN] * inputs, [Encoded([1], 10, 10, len(tags), batch)] * inputs, call)
        telemetry.end(call.span)
    telemetry.shutdown()
    assert telemetry.counts.started == telemetry.counts.ended
    return exporter.get_finished_spans()


def test_a_batch_links_its_callers_and_they_link_it():
    """Three calls encoded together: one batch span in a trace of its own, links both ways."""
    spans = recorded(level=2, calls=3, inputs=2)
    (batch,) = [span for span in spans if span.name == names.SPAN_TOKENIZER_BATCH]
    calls = {span.context.span_id for span in spans if span.name == "Encode"}
    waits = [span for span in spans if span.name == names.SPAN_TOKENIZER_WAIT]
    assert batch.parent is None
    assert batch.context.trace_id not in {span.context.trace_id for span in spans if span is not batch}
    assert {link.context.span_id for link in batch.links} == calls
    assert len(waits) == 6
    assert {link.context.span_id for wait in waits for link in wait.links} == {batch.context.span_id}
    assert batch.attributes[names.BATCH_SIZE] == 6


def test_characters_are_those_that_the_caller_wrote():
    """Of every part of every message, in characters and not in bytes; beside the tokens that came of them."""
    encodes = [span for span in recorded(level=2, calls=1, inputs=2) if span.name == names.SPAN_TOKENIZER_ENCODE]
    said = [(span.attributes[names.CHARACTERS], span.attributes[names.TOKENS]) for span in encodes]
    assert said == [(16, 1), (16, 1)]


def test_one_caller_alone_has_no_batch():
    """A batch of one call's inputs says nothing that the call does not say."""
    assert names.SPAN_TOKENIZER_BATCH not in {span.name for span in recorded(level=2, calls=1, inputs=3)}


def test_level_one_has_no_sub_stages():
    """At level 1 the call alone is recorded."""
    assert {span.name for span in recorded(level=1, calls=2, inputs=1)} == {"Encode"}
