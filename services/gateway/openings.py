"""What a request is to the stream process and to quotas: the command that opens it, and the most it can use."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from headrace import errors
from headrace.v1 import engine_pb2, generation_pb2, stream_pb2
from services.gateway.identity import Identity, Limits

BYTES_A_TOKEN = 4
USUAL_ANSWER = 256  # tokens, where max_tokens is unset


def check_room(generation: generation_pb2.Generation, prompt_length: int, context_length: int) -> None:
    """Refuses what can never run, with the numbers."""
    if prompt_length >= context_length:
        raise errors.InvalidArgument(
            f"the prompt has {prompt_length} tokens; expected fewer than the context of {context_length}",
            field=f"generation.{generation.WhichOneof('input')}",
            reason=errors.Reason.CONTEXT_LENGTH,
        )
    if generation.min_tokens > context_length - prompt_length:
        raise errors.InvalidArgument(
            f"generation.min_tokens is {generation.min_tokens}; "
            f"expected at most {context_length - prompt_length}, what the context leaves",
            field="generation.min_tokens",
            reason=errors.Reason.CONTEXT_LENGTH,
        )


def expected_cost(generation: generation_pb2.Generation) -> float:
    """Tokens that a request may cost, before it is encoded: about four bytes each, and the answers asked for."""
    if generation.HasField("token_ids"):
        prompt = float(len(generation.token_ids.ids))
    else:
        prompt = generation.ByteSize() / BYTES_A_TOKEN
    answer = generation.max_tokens if generation.HasField("max_tokens") else USUAL_ANSWER
    return prompt + max(1, generation.n) * answer


def worst_case(
    generation: generation_pb2.Generation, prompt_length: int, context_length: int, limits: Limits
) -> tuple[int | None, int]:
    """The max_tokens to ask for (None: unset), and the most tokens that the request can use, its prompt included.

    Unset, it is the rest of the context, or less: what the limits of the key can ever grant.
    """
    answer_count, room = max(1, generation.n), context_length - prompt_length
    if generation.HasField("max_tokens"):
        most = min(generation.max_tokens, room)
        return generation.max_tokens, prompt_length + answer_count * most
    caps = [cap for cap in (limits.tokens_per_minute, limits.tokens_per_day) if cap]
    if not caps:
        return None, prompt_length + answer_count * room
    most = min(room, max(1, (min(caps) - prompt_length) // answer_count))
    return most, prompt_length + answer_count * most


def opening(
    generation: generation_pb2.Generation,
    identity: Identity,
    prompt: Sequence[int],
    defaults: generation_pb2.SamplingParameters,
) -> stream_pb2.DeliverOpen:
    """The command to the stream process; unset sampling fields become the model's defaults."""
    sampling = generation_pb2.SamplingParameters()
    sampling.CopyFrom(defaults)
    sampling.MergeFrom(generation.sampling)
    if generation.resumable and not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(63)  # another engine must draw the same
    opened = engine_pb2.OpenGeneration(
        prompt_token_ids=prompt,
        sampling=sampling,
        min_tokens=generation.min_tokens,
        stop_token_ids=generation.stop.token_ids,
        ignore_eos=generation.stop.ignore_eos,
        n=generation.n or 1,
        logprobs=generation.logprobs if generation.HasField("logprobs") else None,
        prompt_logprobs=generation.prompt_logprobs if generation.HasField("prompt_logprobs") else None,
        priority=identity.priority(generation.priority),
    )
    return stream_pb2.DeliverOpen(
        generation=opened,
        stop=generation.stop,
        include_token_ids=generation.include_token_ids,
        tenant=identity.tenant,
    )
