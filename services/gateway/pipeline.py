"""One request's life, in one coroutine: admit, encode, route, deliver, account. Knows no gRPC.

Every front calls `Pipeline.run` with a Generation, a Ticket and a Flow; the rest is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from headrace import errors
from headrace.v1 import engine_pb2, gateway_pb2, generation_pb2, stream_pb2, tokenizer_pb2
from services.common import names, telemetry
from services.gateway import openings, spans, validation
from services.gateway.accounts import Subject
from services.gateway.admission import Admission, Claim
from services.gateway.front import Salts
from services.gateway.identity import ANONYMOUS, Identity
from services.gateway.meter import Meter
from services.gateway.peers import Delivery, Peers
from services.gateway.quota import Usage, outcome_of
from services.gateway.receipt import Stopwatch, resumed_timings, stage_timings
from services.gateway.router import Chosen, Router
from services.gateway.settings import LimitSettings

UNLIMITED_CREDITS = 2**31 - 1
DEADLINE_MARGIN_S = 0.002
RETRY_JITTER_S = 0.05

Send = Callable[[int, gateway_pb2.Delta], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Flow:
    """How a reader takes an answer.

    Attributes:
        send: takes each delta with its sequence number; awaiting it is what holds the engine back.
        whole: the text is wanted in one delta at the end, and nothing holds the engine back.
        window: tokens that may be generated before credits come back.
        grants: credits come back as `send` returns; else the reader grants them itself.
        opened: told the open delivery, before its first message; again if another takes its place.
    """

    send: Send
    whole: bool = False
    window: int = UNLIMITED_CREDITS
    grants: bool = True
    opened: Callable[[Delivery], Awaitable[None]] | None = None


@dataclass(slots=True)
class Ticket:
    """One request on its way: who asks, how long there is, and what happened when.

    Attributes:
        span: the root span; ended by whoever made it.
        watch: the gateway's moments.
        deadline_ns: monotonic, None without one.
        request_id: the server's own id, unique.
        stream_id: names a resumable stream; nobody can guess it. "": not resumable.
        subject: what it is, for metrics and the access log.
        identity: whose it is.
        usage: what it uses; None until it is known what that could be.
    """

    span: Span
    watch: Stopwatch
    deadline_ns: int | None = None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    stream_id: str = ""
    subject: Subject = field(default_factory=Subject)
    identity: Identity = ANONYMOUS
    usage: Usage | None = None

    def timeout_s(self) -> float | None:
        """Seconds that the next hop may take."""
        if self.deadline_ns is None:
            return None
        left = (self.deadline_ns - time.monotonic_ns()) / 1e9 - DEADLINE_MARGIN_S
        if left <= 0:
            raise errors.DeadlineExceeded("the deadline has passed")
        return left


class Pipeline:
    """Runs requests through tokenizer, stream process and engine."""

    def __init__(
        self,
        peers: Peers,
        router: Router,
        admission: Admission,
        limits: LimitSettings,
        telemetry_: telemetry.Telemetry,
        salts: Salts,
        meter: Meter,
    ) -> None:
        self._peers, self._router, self._admission = peers, router, admission
        self._limits, self._telemetry, self._salts = limits, telemetry_, salts
        self._meter = meter

    async def run(
        self, generation: generation_pb2.Generation, ticket: Ticket, flow: Flow
    ) -> tuple[int, gateway_pb2.Final]:
        """Generates; returns the final message and its sequence number.

        Raises:
            errors.HeadraceError: however it failed.
        """
        try:
            return await self._run(generation, ticket, flow)
        except errors.InvalidArgument as error:
            error.field = validation.contract_path(error.field, generation)
            raise

    async def _run(
        self, generation: generation_pb2.Generation, ticket: Ticket, flow: Flow
    ) -> tuple[int, gateway_pb2.Final]:
        watch = ticket.watch
        async with self._admit(generation, ticket) as facts:
            prompt, bad_sequences, encode_timings = await self._encode(generation, ticket)
            openings.check_room(generation, len(prompt), facts.context_length)
            limits = ticket.identity.limits
            max_tokens, reserved = openings.worst_case(generation, len(prompt), facts.context_length, limits)
            usage = Usage(ticket.request_id, ticket.identity.tenant, ticket.identity.key_id, facts.model)
            usage.method, usage.prompt_tokens = ticket.subject.method, len(prompt)
            ticket.usage = usage
            opening = openings.opening(generation, ticket.identity, prompt, facts.default_sampling)
            opening.generation.request_id, opening.stream_id = ticket.request_id, ticket.stream_id
            opening.generation.cache_salt = self._salts.of(ticket.identity.tenant)
            opening.generation.fair_key = self._salts.fair_key(ticket.identity.tenant)
            opening.generation.fair_weight = ticket.identity.weight
            opening.generation.bad_token_sequences.extend(bad_sequences)
            opening.generation.credit_count, opening.whole = flow.window, flow.whole
            if max_tokens is not None:
                opening.generation.max_tokens = max_tokens
            async with self._meter.hold(ticket.identity, usage, reserved):
                first, number, final = await self._deliver(opening, facts.model, ticket, flow, usage)
                usage.take(final.usage, final.endings)
        if first is None:
            raise errors.Internal("the answer ended before its first token")
        watch.finished = time.monotonic_ns()
        answer = gateway_pb2.Final(
            endings=final.endings,
            usage=final.usage,
            timings=stage_timings(watch, encode_timings, first, final, whole=flow.whole),
            request_id=generation.request_id or ticket.request_id,
            trace_id=telemetry.trace_id(ticket.span),
            model=facts.model,
            metadata=generation.metadata,
            prompt_logprobs=final.prompt_logprobs,
        )
        ticket.subject.answer = answer
        spans.describe_answer(ticket.span, answer, ticket.request_id)
        return number, answer

    async def _deliver(
        self, opening: stream_pb2.DeliverOpen, model: str, ticket: Ticket, flow: Flow, usage: Usage
    ) -> tuple[stream_pb2.FirstTokenTimings | None, int, stream_pb2.DeliverFinal]:
        """Has an engine generate, and hands on what comes; an engine that is lost before that is replaced."""
        sent = opening.generation
        block_names = self._router.index.names(sent.cache_salt, sent.prompt_token_ids)
        tried: list[str] = []
        while True:
            with self._route(model, ticket, block_names, len(sent.prompt_token_ids), tried) as chosen:
                opening.engine_address = chosen.address
                del opening.fallback_engine_addresses[:]
                opening.fallback_engine_addresses.extend(self._router.others(chosen.address, model))
                command = stream_pb2.DeliverRequest(open=opening)
                try:
                    async with self._peers.relays.deliver(command, ticket.span, ticket.timeout_s()) as delivery:
                        result = await self._relay(delivery, ticket.watch, flow, usage)
                except errors.Unavailable as lost:
                    if lost.lost_address == chosen.address:
                        self._router.failed(chosen.engine)
                    tried.append(chosen.address)
                    if usage.completion_tokens or not self._router.can_serve(model, tried):
                        raise
                else:
                    found = None if sent.HasField("prompt_logprobs") else result[2].usage.cached_token_count
                    self._router.succeeded(chosen, found)
                    return result
            await asyncio.sleep(random.uniform(0, RETRY_JITTER_S) * len(tried))  # noqa: S311 - not a secret

    async def resume(
        self, asked: stream_pb2.DeliverResume, ticket: Ticket, flow: Flow
    ) -> tuple[int, gateway_pb2.Final]:
        """Goes on with a stream whose connection was lost; returns its final message and that one's number."""
        async with self._admission.admit(_claim(ticket, 0, 0.0)):
            with _prefixed("resume."):
                ticket.watch.admitted = ticket.watch.encoded = ticket.watch.routed = time.monotonic_ns()
                command = stream_pb2.DeliverRequest(resume=asked)
                usage = Usage(
                    ticket.request_id, ticket.identity.tenant, ticket.identity.key_id, "", ticket.subject.method
                )
                async with (
                    self._meter.hold(ticket.identity, usage, 0),
                    self._peers.relays.deliver(command, ticket.span, ticket.timeout_s()) as delivery,
                ):
                    _, number, final = await self._relay(delivery, ticket.watch, flow, usage)
                    usage.outcome = outcome_of(final.endings)
        answer = gateway_pb2.Final(
            endings=final.endings,
            usage=final.usage,
            timings=resumed_timings(final),
            request_id=ticket.request_id,
            trace_id=telemetry.trace_id(ticket.span),
            prompt_logprobs=final.prompt_logprobs,
        )
        ticket.subject.answer = answer
        spans.describe_answer(ticket.span, answer, ticket.request_id)
        return number, answer

    @contextlib.asynccontextmanager
    async def _admit(
        self, generation: generation_pb2.Generation, ticket: Ticket
    ) -> AsyncIterator[engine_pb2.GetEngineResponse]:
        """Checks every field and holds a place; yields the facts of the model asked for."""
        result, open_requests, queued = "admitted", self._admission.open_count, self._admission.queued_count
        async with contextlib.AsyncExitStack() as stack:
            try:
                if generation.model:
                    ticket.identity.check_model(generation.model)
                facts = self._router.facts(generation.model)
                ticket.identity.check_model(facts.model)
                ticket.subject.operation, ticket.subject.model = spans.operation(generation), facts.model
                spans.describe_request(ticket.span, generation, facts.model)
                validation.check_generation(generation, facts.vocabulary_size, facts.context_length)
                priority = ticket.identity.priority(generation.priority)
                claim = _claim(ticket, priority, openings.expected_cost(generation))
                await stack.enter_async_context(self._admission.admit(claim))
            except errors.HeadraceError as error:
                result = error.reason
                raise
            finally:
                ticket.watch.admitted = time.monotonic_ns()
                self._telemetry.phase(
                    names.SPAN_ADMIT,
                    ticket.span,
                    ticket.watch.arrived,
                    ticket.watch.admitted,
                    {names.OPEN_REQUESTS: open_requests, names.QUEUED_REQUESTS: queued, names.ADMIT_RESULT: result},
                    error="" if result == "admitted" else result,
                )
            stack.callback(lambda: self._admission.used(claim, *_used(ticket)))
            yield facts

    async def _encode(
        self, generation: generation_pb2.Generation, ticket: Ticket
    ) -> tuple[Sequence[int], Sequence[generation_pb2.TokenIds], tokenizer_pb2.EncodeTimings | None]:
        """The prompt's token ids and those of the bad words, in one call; token ids are used as they are."""
        kind = generation.WhichOneof("input")
        inputs = []
        if kind == "chat":
            inputs.append(tokenizer_pb2.EncodeInput(chat=generation.chat))
        elif kind == "prompt":
            inputs.append(tokenizer_pb2.EncodeInput(text=generation.prompt))
        for word in generation.sampling.bad_words:
            inputs += [tokenizer_pb2.EncodeInput(text=word), tokenizer_pb2.EncodeInput(text=f" {word.lstrip()}")]
        if not inputs:
            ticket.watch.encoded = ticket.watch.admitted
            return generation.token_ids.ids, (), None
        response = await self._peers.tokenizer.encode(inputs, ticket.span, ticket.timeout_s())
        ticket.watch.encoded = time.monotonic_ns()
        if kind == "token_ids":
            return generation.token_ids.ids, response.encodings, response.timings
        ids = response.encodings[0].ids
        if not ids:
            path = f"generation.{kind}"
            raise errors.InvalidArgument(
                f"{path} encodes to no token; expected at least one", field=path, reason=errors.Reason.EMPTY_PROMPT
            )
        return ids, [words for words in response.encodings[1:] if words.ids], response.timings

    @contextlib.contextmanager
    def _route(
        self, model: str, ticket: Ticket, block_names: Sequence[int], prompt_length: int, tried: Sequence[str]
    ) -> Iterator[Chosen]:
        """Holds a place on an engine."""
        with self._router.choose(model, block_names, prompt_length, tried) as chosen:
            ticket.watch.routed = time.monotonic_ns()
            self._telemetry.phase(
                names.SPAN_ROUTE,
                ticket.span,
                ticket.watch.encoded,
                ticket.watch.routed,
                {
                    names.ENGINE_ADDRESS: chosen.address,
                    names.PREDICTED_CACHED_TOKENS: chosen.predicted_cached,
                    names.ATTEMPT: len(tried),
                },
            )
            yield chosen

    async def _relay(
        self, delivery: Delivery, watch: Stopwatch, flow: Flow, usage: Usage
    ) -> tuple[stream_pb2.FirstTokenTimings | None, int, stream_pb2.DeliverFinal]:
        """Hands deltas on, and credits back as they are taken, up to the final message."""
        if flow.opened is not None:
            await flow.opened(delivery)
        first: stream_pb2.FirstTokenTimings | None = None
        owed: dict[int, int] = {}  # credits that the reader has earned and the engine has not got yet, by answer
        async for message in delivery.messages():
            received = time.monotonic_ns()
            if message.HasField("final"):
                watch.final_received = received
                return first, message.sequence_number, message.final
            delta = message.delta
            usage.completion_tokens += delta.token_count
            await flow.send(
                message.sequence_number,
                gateway_pb2.Delta(
                    index=delta.index,
                    text=delta.text,
                    token_count=delta.token_count,
                    token_ids=delta.token_ids,
                    logprobs=delta.logprobs,
                ),
            )
            if first is None:
                first = delta.first_token_timings
                watch.first_received, watch.first_sent = received, time.monotonic_ns()
            if flow.whole or not flow.grants:
                continue
            earned = owed.get(delta.index, 0) + delta.token_count
            if earned >= max(1, flow.window // 2):
                await delivery.grant(earned, delta.index)
                earned = 0
            owed[delta.index] = earned
        raise errors.Unavailable("the stream process ended the answer without a final message")


def _claim(ticket: Ticket, priority: int, cost: float) -> Claim:
    identity = ticket.identity
    priority = priority or identity.priority(0)
    return Claim(identity.tenant, identity.weight, priority, max(1.0, cost), ticket.deadline_ns)


def _used(ticket: Ticket) -> tuple[int, float | None]:
    """Tokens that were computed for a request, and the seconds that it waited in its engine, where it was answered."""
    answer = ticket.subject.answer
    tokens = ticket.usage.computed if ticket.usage is not None else 0
    return tokens, answer.timings.queue_ns / 1e9 if answer is not None else None


@contextlib.contextmanager
def _prefixed(prefix: str) -> Iterator[None]:
    """Puts a field that a callee named where the caller knows it."""
    try:
        yield
    except errors.HeadraceError as error:
        error.field = error.field and prefix + error.field
        raise
