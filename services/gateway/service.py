"""The protobuf edge of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Coroutine

import grpc.aio

from headrace import errors
from headrace.v1 import (
    admin_pb2_grpc,
    engine_pb2,
    gateway_pb2,
    gateway_pb2_grpc,
    generation_pb2,
    stream_pb2,
    tokenizer_pb2,
)
from services.common import names, telemetry
from services.common.calls import REQUEST_ID_KEY, TRACE_ID_KEY, Call
from services.common.logs import Log
from services.common.redis_watch import RedisWatch
from services.common.serve import ServerSettings, Service, SidePort, StartError
from services.common.settings import describe
from services.common.shared import SharedStateLost
from services.gateway import admin, validation
from services.gateway.accounts import Accounts
from services.gateway.admission import Admission
from services.gateway.front import Salts, decide_access, find_registry, is_loopback, key_ring, make_meter
from services.gateway.identity import Access, BadKeys, Identity
from services.gateway.patience import Patience
from services.gateway.peers import Peers
from services.gateway.pipeline import Flow, Pipeline, Ticket
from services.gateway.receipt import Stopwatch
from services.gateway.router import Router
from services.gateway.session import Reader
from services.gateway.settings import GatewaySettings

FULL_NAME = "headrace.v1.GatewayService"
TIMINGS_KEY = "headrace-timings-bin"
STREAM_ID_KEY = "headrace-stream-id"


class GatewayProcess(Service):
    """The gateway as `serve` sees it."""

    name = "gateway"

    def __init__(self, settings: GatewaySettings, telemetry_: telemetry.Telemetry, log: Log) -> None:
        self._telemetry, self._log = telemetry_, log
        self._router = Router(settings.peers.engine_addresses)
        url = settings.peer_tls.redis_url(settings.redis.url)
        self._redis_watch = RedisWatch(url, log)
        registry = find_registry(settings.peers, url)
        credentials = settings.peer_tls.credentials()
        self._peers = Peers(settings.peers, self._router, credentials, telemetry_, log, registry)
        limits, router = settings.limits, self._router
        self._admission = Admission(
            limits.max_open_requests,
            limits.max_queued_requests,
            lambda: math.ceil(limits.load_share * router.sequence_count(limits.knee)),
            router.sequence_count,
        )
        salts = Salts(settings.access)
        self._meter = make_meter(settings.quotas, url, telemetry_.metrics, log)
        self._pipeline = Pipeline(
            self._peers, self._router, self._admission, settings.limits, telemetry_, salts, self._meter
        )
        accounts = Accounts(telemetry_.metrics, log)
        accounts.begin(self._router, self._admission, settings.cost.price_hourly)
        self._access = decide_access(settings.access, settings.server)
        self._keys = key_ring(settings.access, url, self._access, log)
        self._servicer = GatewayServicer(
            self._pipeline, self._peers, self._router, self._admission, settings, accounts, self._access
        )
        self._admin = self._make_admin(settings)
        self._background: list[asyncio.Task[None]] = []

    def _make_admin(self, settings: GatewaySettings) -> SidePort | None:
        """The admin port, not yet open; None: there is none."""
        said = settings.admin
        if not said.admin_port:
            return None
        if not is_loopback(said.admin_host) and not said.admin_token:
            raise StartError(
                f"HEADRACE_GATEWAY_ADMIN_HOST={said.admin_host} can be reached from elsewhere: "
                "set HEADRACE_GATEWAY_ADMIN_TOKEN"
            )
        where = ServerSettings(host=said.admin_host, port=said.admin_port)
        port = SidePort(self._telemetry, self._log, where, settings.tls)
        configuration = describe(settings, "gateway")
        engines, token = self._peers.engines, said.admin_token
        servicer = admin.AdminServicer(engines, self._router, configuration, token, self._log)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, port.server)
        return port

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Adds the servicer."""
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(self._servicer, server)
        return [FULL_NAME]

    async def start(self) -> None:
        """Waits for the others, then sends one real generation through all of them."""
        await self._redis_watch.begin()
        await self._read_keys()
        if self._admin is not None:
            await self._admin.open(admin.FULL_NAME)
        self._background.append(asyncio.create_task(self._peers.engines.watch()))
        self._background.append(asyncio.create_task(self._meter.run()))
        await self._peers.wait_until_serving()
        await self._probe()

    async def _read_keys(self) -> None:
        """Keys that are wrong end the process; a Redis that does not answer is waited for, callers are refused."""
        if self._keys is None:
            return
        try:
            await self._keys.load()
        except BadKeys as error:
            raise StartError(str(error)) from error
        except SharedStateLost as error:
            self._log.warning("keys not read; callers are refused until they are", reason=str(error))
        self._background.append(asyncio.create_task(self._keys.watch()))

    async def _probe(self) -> None:
        span = self._telemetry.start(names.SPAN_PROBE)
        ticket = Ticket(span, Stopwatch(time.monotonic_ns()))
        span.request_id = ticket.request_id
        generation = generation_pb2.Generation(prompt="Hello", max_tokens=2)
        try:
            await self._pipeline.run(generation, ticket, Flow(_ignore))
        except errors.HeadraceError as error:
            raise StartError(f"the first generation failed: {error}") from error
        finally:
            self._telemetry.end(span)

    async def stop(self) -> None:
        """Leaves every peer."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._admin is not None:
            await self._admin.close()
        if self._keys is not None:
            await self._keys.close()
        await self._redis_watch.close()
        await self._meter.close()
        await self._peers.close()


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """The public API."""

    def __init__(
        self,
        pipeline: Pipeline,
        peers: Peers,
        router: Router,
        admission: Admission,
        settings: GatewaySettings,
        accounts: Accounts,
        access: Access,
    ) -> None:
        self._pipeline, self._peers, self._router, self._admission = pipeline, peers, router, admission
        self._limits, self._accounts, self._access = settings.limits, accounts, access

    async def Generate(self, request: gateway_pb2.GenerateRequest, call: Call) -> gateway_pb2.GenerateResponse:  # noqa: N802
        """One whole answer."""
        deltas: list[gateway_pb2.Delta] = []

        async def collect(_: int, delta: gateway_pb2.Delta) -> None:
            deltas.append(delta)

        with self._inside_as(call) as ticket:
            _, final = await self._pipeline.run(request.generation, ticket, Flow(collect, whole=True))
        call.trailing.append((TIMINGS_KEY, final.timings.SerializeToString()))
        answers = [_answer([d for d in deltas if d.index == ending.index], ending) for ending in final.endings]
        return gateway_pb2.GenerateResponse(
            answers=answers,
            usage=final.usage,
            timings=final.timings,
            request_id=final.request_id,
            trace_id=final.trace_id,
            model=final.model,
            metadata=final.metadata,
            prompt_logprobs=final.prompt_logprobs,
        )

    async def GenerateStream(self, request: gateway_pb2.GenerateStreamRequest, call: Call) -> None:  # noqa: N802
        """Deltas as they come, then the final message."""

        async def send(number: int, delta: gateway_pb2.Delta) -> None:
            await to.write(gateway_pb2.GenerateStreamResponse(sequence_number=number, delta=delta))

        limit_s = self._limits.slow_reader_s
        with (
            self._inside_as(call, resumable=request.generation.resumable) as ticket,
            Patience(call.write, limit_s) as to,
        ):
            if ticket.stream_id:
                await call.send_headers(((STREAM_ID_KEY, ticket.stream_id),))
            flow = Flow(send, window=self._limits.credit_window)
            number, final = await self._pipeline.run(request.generation, ticket, flow)
            call.trailing.append((TIMINGS_KEY, final.timings.SerializeToString()))
            call.answered = True
            await to.write(gateway_pb2.GenerateStreamResponse(sequence_number=number, final=final))

    async def GenerateSession(  # noqa: N802
        self, requests: AsyncIterator[gateway_pb2.GenerateSessionRequest], call: Call
    ) -> None:
        """A stream under the reader's own credits; also where a stream is resumed."""
        first = await anext(aiter(requests), None)
        command = first.WhichOneof("command") if first is not None else None
        if first is None or command not in ("open", "resume"):
            raise errors.InvalidArgument(
                f"command is {command or 'nothing'}; expected open or resume first", field="command"
            )
        credit_count = getattr(first, command).credit_count
        validation.check_credits(credit_count, f"{command}.credit_count")
        answer_count = max(1, first.open.generation.n) if command == "open" else 1
        reader = Reader(credit_count, answer_count, self._limits.slow_reader_s)

        async def send(number: int, delta: gateway_pb2.Delta) -> None:
            await to.write(gateway_pb2.GenerateSessionResponse(sequence_number=number, delta=delta))
            reader.took(delta)

        flow = Flow(send, window=credit_count, grants=False, opened=reader.opened)
        resumable = command == "open" and first.open.generation.resumable
        with (
            self._inside_as(call, resumable=resumable) as ticket,
            Patience(call.write, self._limits.slow_reader_s) as to,
        ):
            async with _companions(reader.obey(requests), reader.watch()):
                if command == "open":
                    opened = gateway_pb2.SessionOpened(
                        stream_id=ticket.stream_id, trace_id=telemetry.trace_id(call.span)
                    )
                    await to.write(gateway_pb2.GenerateSessionResponse(sequence_number=-1, opened=opened))
                    number, final = await self._pipeline.run(first.open.generation, ticket, flow)
                else:
                    asked = stream_pb2.DeliverResume(
                        stream_id=first.resume.stream_id,
                        tenant=ticket.identity.tenant,
                        last_sequence_number=first.resume.last_sequence_number,
                        credit_count=credit_count,
                    )
                    number, final = await self._pipeline.resume(asked, ticket, flow)
            call.trailing.append((TIMINGS_KEY, final.timings.SerializeToString()))
            call.answered = True
            await to.write(gateway_pb2.GenerateSessionResponse(sequence_number=number, final=final))

    async def Tokenize(self, request: gateway_pb2.TokenizeRequest, call: Call) -> gateway_pb2.TokenizeResponse:  # noqa: N802
        """Ids of a text or chat."""
        facts = self._facts(request.model, call)
        kind = request.WhichOneof("input")
        if kind == "text":
            validation.check_text_size(len(request.text.encode()), facts.context_length, "text")
            asked = tokenizer_pb2.EncodeInput(text=request.text)
        elif kind == "chat":
            validation.check_chat(request.chat, facts.context_length, "chat")
            asked = tokenizer_pb2.EncodeInput(chat=request.chat)
        else:
            raise errors.InvalidArgument("input is nothing; expected one of text, chat", field="input")
        response = await self._peers.tokenizer.encode([asked], call.span, call.timeout_s())
        return gateway_pb2.TokenizeResponse(token_ids=response.encodings[0].ids)

    async def Detokenize(self, request: gateway_pb2.DetokenizeRequest, call: Call) -> gateway_pb2.DetokenizeResponse:  # noqa: N802
        """Text of ids."""
        facts = self._facts(request.model, call)
        validation.check_token_ids(request.token_ids, facts.vocabulary_size, "token_ids")
        text = await self._peers.tokenizer.decode(
            request.token_ids, call.span, call.timeout_s(), include_special_tokens=request.include_special_tokens
        )
        return gateway_pb2.DetokenizeResponse(text=text)

    async def ListModels(self, request: gateway_pb2.ListModelsRequest, call: Call) -> gateway_pb2.ListModelsResponse:  # noqa: N802
        """What can be asked."""
        allowed = self._identify(call).models
        models = [
            gateway_pb2.Model(
                name=name,
                architecture=facts.architecture,
                context_length=facts.context_length,
                vocabulary_size=facts.vocabulary_size,
                dtype=facts.dtype,
                quantization=facts.quantization,
                kv_cache_dtype=facts.kv_cache_dtype,
            )
            for name, facts in sorted(self._router.models().items())
            if not allowed or name in allowed
        ]
        return gateway_pb2.ListModelsResponse(models=models)

    async def GetStats(self, request: gateway_pb2.GetStatsRequest, call: Call) -> gateway_pb2.GetStatsResponse:  # noqa: N802
        """What each engine is doing."""
        self._identify(call)
        engines = list(self._router.engines.values())
        answers = await asyncio.gather(*(self._peers.engines.stats(engine.address) for engine in engines))
        unknown = engine_pb2.GetEngineResponse()
        states = [
            gateway_pb2.EngineState(
                address=engine.address,
                reachable=stats is not None,
                model=facts.model,
                stats=stats,
                dtype=facts.dtype,
                quantization=facts.quantization,
                kv_cache_dtype=facts.kv_cache_dtype,
            )
            for engine, stats in zip(engines, answers, strict=True)
            for facts in [engine.facts or unknown]
        ]
        return gateway_pb2.GetStatsResponse(engines=states, open_request_count=self._admission.open_count)

    def _identify(self, call: Call) -> Identity:
        return self._access.identify(call.metadata, call.certificate_names)

    def _facts(self, model: str, call: Call) -> engine_pb2.GetEngineResponse:
        identity = self._identify(call)
        if model:
            identity.check_model(model)
        facts = self._router.facts(model)
        identity.check_model(facts.model)
        return facts

    @contextlib.contextmanager
    def _inside_as(self, call: Call, *, resumable: bool = False):  # type: ignore[no-untyped-def]
        """The request's ticket; its ids travel in the trailing metadata however it ends."""
        ticket = Ticket(call.span, Stopwatch(call.arrival_ns), call.deadline_ns)
        ticket.stream_id = secrets.token_urlsafe(24) if resumable else ""
        ticket.subject.method = call.method.rpartition("/")[2]
        call.span.request_id = ticket.request_id
        call.trailing += [(REQUEST_ID_KEY, ticket.request_id), (TRACE_ID_KEY, telemetry.trace_id(call.span))]
        reason = ""
        try:
            ticket.identity = self._identify(call)
            ticket.subject.tenant = ticket.identity.tenant
            yield ticket
        except BaseException as raised:
            reason = call.reason_of(raised)
            if isinstance(raised, errors.HeadraceError):
                raised.request_id = ticket.request_id
            raise
        finally:
            self._accounts.ended(
                ticket.subject,
                ticket.watch,
                request_id=ticket.request_id,
                trace_id=telemetry.trace_id(call.span),
                reason=reason,
            )


def _answer(deltas: list[gateway_pb2.Delta], ending: generation_pb2.Ending) -> gateway_pb2.Answer:
    return gateway_pb2.Answer(
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=[logprob for delta in deltas for logprob in delta.logprobs],
        ending=ending,
    )


@contextlib.asynccontextmanager
async def _companions(*work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Runs work beside a block: its failure is the block's, and the block's end is its end."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _ignore(_: int, delta: gateway_pb2.Delta) -> None:
    """Takes a delta and does nothing with it."""
