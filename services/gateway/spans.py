"""What the root span says of a request and its answer. Knows the names, not the SDK; never a prompt or a text."""

from __future__ import annotations

from opentelemetry.trace import Span

from headrace.v1 import gateway_pb2, generation_pb2
from services.common import names


def operation(generation: generation_pb2.Generation) -> str:
    """The semantic conventions' word for what is asked."""
    return "chat" if generation.WhichOneof("input") == "chat" else "text_completion"


def describe_request(span: Span, generation: generation_pb2.Generation, model: str) -> None:
    """What was asked."""
    if not span.is_recording():
        return
    span.set_attribute(names.GEN_AI_OPERATION_NAME, operation(generation))
    span.set_attribute(names.GEN_AI_PROVIDER_NAME, "headrace")
    span.set_attribute(names.GEN_AI_REQUEST_MODEL, model)
    asked = {
        names.GEN_AI_REQUEST_MAX_TOKENS: (generation, "max_tokens"),
        names.GEN_AI_REQUEST_TEMPERATURE: (generation.sampling, "temperature"),
        names.GEN_AI_REQUEST_TOP_P: (generation.sampling, "top_p"),
        names.GEN_AI_REQUEST_TOP_K: (generation.sampling, "top_k"),
    }
    for name, (message, field_name) in asked.items():
        if message.HasField(field_name):
            span.set_attribute(name, getattr(message, field_name))


def describe_answer(span: Span, answer: gateway_pb2.Final, request_id: str) -> None:
    """What came of it."""
    if not span.is_recording():
        return
    reasons = [generation_pb2.FinishReason.Name(e.finish_reason).removeprefix("FINISH_REASON_") for e in answer.endings]
    span.set_attribute(names.GEN_AI_RESPONSE_FINISH_REASONS, [reason.lower() for reason in reasons])
    span.set_attribute(names.GEN_AI_RESPONSE_MODEL, answer.model)
    span.set_attribute(names.GEN_AI_RESPONSE_ID, request_id)
    span.set_attribute(names.GEN_AI_USAGE_INPUT_TOKENS, answer.usage.prompt_token_count)
    span.set_attribute(names.GEN_AI_USAGE_OUTPUT_TOKENS, answer.usage.completion_token_count)
