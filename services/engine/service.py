"""The protobuf edge of the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc.aio

from headrace import errors
from headrace.v1 import engine_pb2, engine_pb2_grpc, generation_pb2
from services.common import telemetry
from services.common.calls import Call, untraced
from services.common.logs import Log
from services.common.redis_watch import RedisWatch
from services.common.registry import Registry, repeat
from services.common.serve import Service, StartError
from services.common.shared import SharedStateLost
from services.engine import spans, wire
from services.engine.blame import Blame
from services.engine.engine import Engine, EngineConfig
from services.engine.facts import default_sampling, facts_of
from services.engine.loop import EngineLoop
from services.engine.measures import Measures
from services.engine.memory import heap_facts, settle
from services.engine.model.config import ModelError
from services.engine.outputs import StepFacts, StepOutput
from services.engine.profile import MAX_STEPS, Profile
from services.engine.request import RequestRefused
from services.engine.settings import EngineProcessSettings

FULL_NAME = "headrace.v1.EngineService"


class EngineProcess(Service):
    """The engine process as `serve` sees it."""

    name = "engine"

    def __init__(self, settings: EngineProcessSettings, telemetry_: telemetry.Telemetry, log: Log) -> None:
        self._settings, self._log = settings, log
        self._servicer = EngineServicer(telemetry_)
        self._engine: Engine | None = None
        self._registration: asyncio.Task[None] | None = None
        self._registry: Registry | None = None
        self._redis_url = settings.peer_tls.redis_url(settings.redis.url)
        self._redis_watch = RedisWatch(self._redis_url if settings.registry.advertise else "", log)
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Adds the servicer."""
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self._servicer, server)
        return [FULL_NAME]

    async def start(self) -> None:
        """Loads the model and generates once."""
        await self._redis_watch.begin()
        directory = self._settings.model.directory()
        began = time.monotonic()
        try:
            engine = await asyncio.to_thread(self._load, directory)
        except (ModelError, ValueError, RuntimeError, OSError, MemoryError) as error:
            raise StartError(str(error)) from error
        self._log.info(
            "model loaded",
            model=self._settings.model.name,
            seconds=round(time.monotonic() - began, 2),
            weight_mb=round(engine.memory.weight_bytes / 1e6, 1),
            kv_mb=round(engine.memory.kv_bytes / 1e6, 1),
            kv_blocks=engine.memory.block_count,
            kv_a_token=engine.memory.kv_formula,
            activations_mb=round(engine.memory.peak_activation_bytes / 1e6, 1),
            heap_reserved_mb=round(heap_facts().reserved_bytes / 1e6, 1),
        )
        self._engine = engine
        events = asyncio.get_running_loop()
        engine.on_lost(lambda text: _post(events, self._fail, text))
        self._servicer.begin(engine, self._settings.model.name, default_sampling(directory), self._on_fatal)

        self._register()

    def _register(self) -> None:
        """Says where it is, where it is told to. Raises StartError."""
        address, url = self._settings.registry.advertise, self._redis_url
        if not address:
            return
        if not url:
            raise StartError(f"HEADRACE_ENGINE_ADVERTISE={address} needs HEADRACE_REDIS_URL")
        registry = self._registry = Registry(url)
        work = repeat(lambda: registry.announce(address), "announce", self._log)
        self._registration = asyncio.create_task(work)

    async def _withdraw(self) -> None:
        if self._registration is None or self._registry is None:
            return
        self._registration.cancel()
        await asyncio.gather(self._registration, return_exceptions=True)
        with contextlib.suppress(SharedStateLost, TimeoutError):
            await asyncio.wait_for(self._registry.withdraw(self._settings.registry.advertise), 0.5)
        await self._registry.close()
        self._registration = None

    def _load(self, directory: Path) -> Engine:
        engine = Engine.load(EngineConfig(model_dir=directory, **asdict(self._settings.engine)))
        engine.warm_up()
        settle()
        return engine

    def _on_fatal(self, error: BaseException) -> None:
        self._log.error("engine loop died", exc_info=error)
        self._fail(f"the engine loop died: {type(error).__name__}: {error}")

    def _fail(self, text: str) -> None:
        if not self._failed.done():
            self._failed.set_result(text)

    async def failure(self) -> str:
        """Returns when the engine's loop has died."""
        return await asyncio.shield(self._failed)

    async def drain(self, calls_ended: Callable[[], Awaitable[object]]) -> None:
        """Returns when no generation is open: attached streams last for ever."""
        await self._withdraw()
        await self._servicer.idle.wait()

    async def stop(self) -> None:
        """Ends the engine's thread."""
        await self._redis_watch.close()
        await self._withdraw()
        if self._servicer.loop is not None:
            self._servicer.loop.stop(drain=False)
            await asyncio.to_thread(self._servicer.loop.join, 1.0)
        if self._engine is not None:
            self._engine.close()
        self._servicer.end_spans()


@dataclass(slots=True)
class _Open:
    """One open generation: where its news go and what its spans need."""

    attached: _Attached
    generation_id: int
    index: int
    spans: spans.RequestSpans


@dataclass(slots=True)
class _Attached:
    """One `Attach` call. News gather in `outbox` until its writer takes them, in one message."""

    outbox: list[engine_pb2.GenerationOutput] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    engine_ids: dict[int, dict[int, int]] = field(default_factory=dict)  # generation → answer → engine's own id

    def running(self, generation_id: int, index: int | None = None) -> list[int]:
        """The engine's ids of a generation's answers that have not ended, or of one of them."""
        answers = self.engine_ids.get(generation_id, {})
        return [engine_id for answer, engine_id in answers.items() if index is None or answer == index]

    def tell(self, output: engine_pb2.GenerationOutput) -> None:
        self.outbox.append(output)
        self.wake.set()


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Attach and the questions about the engine. Everything here runs on the event loop."""

    def __init__(self, telemetry_: telemetry.Telemetry) -> None:
        self._telemetry = telemetry_
        self._measures = Measures(telemetry_.metrics)
        self._blame = Blame()
        self._ids = itertools.count(1)
        self._open: dict[int, _Open] = {}
        self._engine_facts = engine_pb2.GetEngineResponse()
        self._profile: Profile | None = None
        self._drained: asyncio.Task[None] | None = None
        self.loop: EngineLoop | None = None
        self.idle = asyncio.Event()
        self.idle.set()

    def begin(
        self,
        engine: Engine,
        model: str,
        default_sampling: generation_pb2.SamplingParameters,
        on_fatal: Callable[..., object],
    ) -> None:
        """Starts the engine's thread; from now on only it touches the engine."""
        events = asyncio.get_running_loop()
        self._engine_facts = facts_of(engine, model, default_sampling)
        self.loop = EngineLoop(
            engine,
            publish=lambda output: _post(events, self._publish, output),
            refused=lambda request_id, refusal: _post(events, self._refuse, request_id, refusal),
            fatal=lambda error: _post(events, on_fatal, error),
        )
        self._measures.begin(engine, self.loop)
        self.loop.start()

    def end_spans(self) -> None:
        """Ends the spans of whatever is still open; the engine's thread is gone."""
        for engine_id in list(self._open):
            self._open[engine_id].spans.fail("INTERNAL")
            self._close(engine_id)

    @untraced
    async def Attach(self, requests: AsyncIterator[engine_pb2.AttachRequest], call: Call) -> None:  # noqa: N802
        """Takes commands and gives each step's news until the stream process goes away."""
        attached = _Attached()
        commands = asyncio.create_task(self._obey(requests, attached))
        try:
            while not (commands.done() and not attached.engine_ids and not attached.outbox):
                attached.wake.clear()
                if attached.outbox:
                    outputs, attached.outbox = attached.outbox, []
                    await call.write(engine_pb2.AttachResponse(outputs=outputs))
                else:
                    await attached.wake.wait()
        finally:
            commands.cancel()
            for generation_id in attached.engine_ids:
                for engine_id in attached.running(generation_id):
                    self._engine_loop().abort(engine_id)
            attached.engine_ids.clear()

    async def _obey(self, requests: AsyncIterator[engine_pb2.AttachRequest], attached: _Attached) -> None:
        loop = self._engine_loop()
        try:
            async for request in requests:
                command = request.WhichOneof("command")
                if command == "open":
                    self._start(request.open, attached)
                elif command == "grant":
                    for grant in (request.grant, *request.more_grants):
                        for engine_id in attached.running(grant.generation_id, grant.index):
                            loop.grant(engine_id, grant.credit_count)
                elif command == "cancel":
                    index = request.cancel.index if request.cancel.HasField("index") else None
                    for engine_id in attached.running(request.cancel.generation_id, index):
                        self._open[engine_id].spans.complete |= request.cancel.complete
                        loop.abort(engine_id)
        finally:
            attached.wake.set()

    def _start(self, command: engine_pb2.OpenGeneration, attached: _Attached) -> None:
        arrival_ns = time.monotonic_ns()
        self.idle.clear()
        for index in range(max(1, command.n)):
            engine_id = next(self._ids)
            told = spans.RequestSpans(self._telemetry, command, index, arrival_ns)
            self._open[engine_id] = _Open(attached, command.generation_id, index, told)
            attached.engine_ids.setdefault(command.generation_id, {})[index] = engine_id
            if self._drained is not None:
                self._refuse(engine_id, RequestRefused("", "SHUTTING_DOWN", "the engine is draining"))
                continue
            request = wire.request_of(command, index, engine_id, arrival_ns)
            ended = wire.ended_before(request, self._engine_facts, command.generation_id)
            if ended is not None:
                attached.tell(ended)
                told.fail("")
                self._close(engine_id)
            else:
                self._engine_loop().add(request)

    def _publish(self, step: StepOutput) -> None:
        if step.facts is not None:
            self._account(step.facts)
        for output in step.outputs:
            opened = self._open.get(output.request_id)
            if opened is None:
                continue
            opened.attached.tell(wire.output_of(output, opened.generation_id, opened.index))
            if output.finish is not None:
                opened.spans.end(output, self._blame.take(output.request_id))
                if output.usage is not None:
                    self._measures.ended(output.usage)
                self._close(output.request_id)

    def _account(self, facts: StepFacts) -> None:
        self._measures.step(facts)
        if self._profile is not None:
            self._profile.add(facts)
        if self._telemetry.exports:
            self._blame.add(facts, self._request_id)
        members = [(m, self._open[m.request_id].spans) for m in facts.members if m.request_id in self._open]
        spans.record_step(self._telemetry, facts, members)

    def _refuse(self, engine_id: int, refusal: RequestRefused) -> None:
        opened = self._open.get(engine_id)
        if opened is not None:
            opened.attached.tell(wire.refusal_of(refusal, opened.generation_id, opened.index))
            opened.spans.fail(refusal.reason)
            self._close(engine_id)

    def _close(self, engine_id: int) -> None:
        opened = self._open.pop(engine_id)
        answers = opened.attached.engine_ids.get(opened.generation_id, {})
        answers.pop(opened.index, None)
        if not answers:
            opened.attached.engine_ids.pop(opened.generation_id, None)
        if not self._open:
            self.idle.set()

    async def GetEngine(self, request: engine_pb2.GetEngineRequest, call: Call) -> engine_pb2.GetEngineResponse:  # noqa: N802
        """What is served."""
        return self._engine_facts

    async def GetStats(  # noqa: N802
        self, request: engine_pb2.EngineServiceGetStatsRequest, call: Call
    ) -> engine_pb2.EngineServiceGetStatsResponse:
        """What the engine is doing, as of the end of the running step."""
        stats, resident = await asyncio.wrap_future(self._engine_loop().call(lambda e: (e.stats(), e.resident())))
        return engine_pb2.EngineServiceGetStatsResponse(stats=wire.stats_of(stats, resident, len(self._open)))

    async def FlushPrefixCache(  # noqa: N802
        self, request: engine_pb2.EngineServiceFlushPrefixCacheRequest, call: Call
    ) -> engine_pb2.EngineServiceFlushPrefixCacheResponse:
        """Forgets cached prefixes."""
        flushed = await asyncio.wrap_future(self._engine_loop().call(Engine.flush_prefix_cache))
        return engine_pb2.EngineServiceFlushPrefixCacheResponse(flushed_block_count=flushed)

    async def Pause(  # noqa: N802
        self, request: engine_pb2.EngineServicePauseRequest, call: Call
    ) -> engine_pb2.EngineServicePauseResponse:
        """Stops scheduling."""
        self._engine_loop().pause()
        return engine_pb2.EngineServicePauseResponse()

    async def Resume(  # noqa: N802
        self, request: engine_pb2.EngineServiceResumeRequest, call: Call
    ) -> engine_pb2.EngineServiceResumeResponse:
        """Goes on scheduling."""
        self._engine_loop().resume()
        return engine_pb2.EngineServiceResumeResponse()

    async def Drain(  # noqa: N802
        self, request: engine_pb2.EngineServiceDrainRequest, call: Call
    ) -> engine_pb2.EngineServiceDrainResponse:
        """Refuses new generations; when the last has ended, the process ends as by SIGTERM."""
        if self._drained is None:
            self._drained = asyncio.create_task(self._end_when_idle())
        return engine_pb2.EngineServiceDrainResponse(open_generation_count=len(self._open))

    async def _end_when_idle(self) -> None:
        await self.idle.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    async def Profile(  # noqa: N802
        self, request: engine_pb2.EngineServiceProfileRequest, call: Call
    ) -> engine_pb2.EngineServiceProfileResponse:
        """Records the next steps; waits for them."""
        if not 1 <= request.step_count <= MAX_STEPS:
            raise errors.InvalidArgument(
                f"step_count is {request.step_count}; expected 1 to {MAX_STEPS}", field="step_count"
            )
        if self._profile is not None:
            raise errors.ResourceExhausted("another profile is being recorded", retry_after_s=1.0)
        self._profile = Profile(request.step_count, self._request_id)
        try:
            return engine_pb2.EngineServiceProfileResponse(chrome_trace=await self._profile.done)
        finally:
            self._profile = None

    def _request_id(self, engine_id: int) -> str:
        """The id of the request that a generation belongs to; "" where it has ended."""
        opened = self._open.get(engine_id)
        return opened.spans.span.request_id if opened is not None else ""

    def _engine_loop(self) -> EngineLoop:
        if self.loop is None:
            raise errors.Unavailable("the engine is starting", reason=errors.Reason.STARTING)
        return self.loop


def _post(events: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Calls a function on the event loop from the engine's thread; after the loop's end, nothing."""
    if not events.is_closed():
        events.call_soon_threadsafe(function, *arguments)
