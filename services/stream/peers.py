"""The engines that this process is attached to: one `Attach` call an engine carries every generation.

With `service`, the only file here that speaks gRPC. A lost engine ends each of its generations at once; the next one
to be opened attaches anew.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable
from typing import Protocol

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace import errors
from headrace.aio_writes import protect
from headrace.v1 import engine_pb2, engine_pb2_grpc
from services.common.calls import peer_error
from services.common.dial import open_channel
from services.common.logs import Log

HEALTH_TIMEOUT_S = 1.0


class Listener(Protocol):
    """Whoever waits for news of one generation; called on the event loop, must not block."""

    def on_output(self, output: engine_pb2.GenerationOutput) -> None:
        """New tokens, or the ending."""

    def on_lost(self, error: errors.HeadraceError) -> None:
        """The engine went away; nothing follows."""


class Generation:
    """One open generation on an attached engine.

    Closing: after its ending or loss every method is a no-op; `cancel` is idempotent.
    """

    def __init__(self, attachment: Attachment, generation_id: int) -> None:
        self._attachment, self.generation_id = attachment, generation_id

    def grant(self, credit_count: int, index: int = 0) -> None:
        """Lets the engine generate this many tokens more of one answer."""
        grant = engine_pb2.GrantCredits(generation_id=self.generation_id, credit_count=credit_count, index=index)
        self._attachment.send(self.generation_id, engine_pb2.AttachRequest(grant=grant))

    def cancel(self, index: int | None = None) -> None:
        """Tells the engine to end it, or one of its answers; the endings still come."""
        self._attachment.send(self.generation_id, _cancel(self.generation_id, index))

    def abandon(self) -> None:
        """Cancels it and listens no more."""
        self.cancel()
        self._attachment.forget(self.generation_id)


class Attachment:
    """One `Attach` call to one engine, from its first generation until the engine is lost or we stop."""

    def __init__(
        self,
        address: str,
        log: Log,
        on_lost: Callable[[], None] = lambda: None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.address = address
        self._on_lost = on_lost
        self.listeners: dict[int, Listener] = {}
        self._unended: dict[int, int] = {}  # answers that have not ended, by generation
        self.lost = False
        self._closing = False
        self._log = log
        self._ids = itertools.count(1)
        self._commands: asyncio.Queue[engine_pb2.AttachRequest] = asyncio.Queue()
        self._channel = open_channel(address, credentials)
        # An empty context: nothing of the request that happened to come first may stick to this task.
        self._task = asyncio.get_running_loop().create_task(self._run(), context=contextvars.Context())

    def open(self, command: engine_pb2.OpenGeneration, listener: Listener) -> Generation:
        """Starts a generation; `command.generation_id` is set here."""
        command.generation_id = next(self._ids)
        self.listeners[command.generation_id] = listener
        self._unended[command.generation_id] = max(1, command.n)
        self.send(command.generation_id, engine_pb2.AttachRequest(open=command))
        return Generation(self, command.generation_id)

    def send(self, generation_id: int, command: engine_pb2.AttachRequest) -> None:
        """Queues a command of an open generation; dropped if it has ended."""
        if generation_id in self.listeners:
            self._commands.put_nowait(command)

    def forget(self, generation_id: int) -> None:
        """Listens to a generation no more; idempotent."""
        self.listeners.pop(generation_id, None)
        self._unended.pop(generation_id, None)

    def _ended(self, generation_id: int) -> None:
        self._unended[generation_id] -= 1
        if not self._unended[generation_id]:
            self.forget(generation_id)

    async def close(self) -> None:
        """Ends the call; its generations are lost."""
        self._closing = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        stub = engine_pb2_grpc.EngineServiceStub(self._channel)
        call = protect(stub.Attach())
        error: errors.HeadraceError = errors.Unavailable(
            f"lost the engine at {self.address}", lost_address=self.address
        )
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(call))
                try:
                    async for response in call:
                        self._dispatch(response)
                finally:
                    writer.cancel()
        except* grpc.aio.AioRpcError as failures:
            error = peer_error(_first(failures), "engine", self.address)
        except* asyncio.InvalidStateError:  # a write after the call had ended
            pass
        finally:
            self.lost = True
            call.cancel()
            if not self._closing:
                self._on_lost()
                self._log.warning("engine lost", address=self.address, open=len(self.listeners), reason=str(error))
            listeners, self.listeners, self._unended = self.listeners, {}, {}
            for listener in listeners.values():
                listener.on_lost(error)
            await self._channel.close()

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:  # type: ignore[type-arg]
        """Sends commands in order; grants that have gathered travel in one message."""
        while True:
            command = await self._commands.get()
            while command.HasField("grant") and not self._commands.empty():
                following = self._commands.get_nowait()
                if not following.HasField("grant"):
                    await call.write(command)
                    command = following
                    break
                command.more_grants.append(following.grant)
            await call.write(command)

    def _dispatch(self, response: engine_pb2.AttachResponse) -> None:
        for output in response.outputs:
            listener = self.listeners.get(output.generation_id)
            if listener is None:
                continue
            if output.HasField("ending"):
                self._ended(output.generation_id)
            try:
                listener.on_output(output)
            except Exception as error:  # noqa: BLE001 - one answer's fault must not end the others
                self._log.error("relay failed", generation_id=output.generation_id, exc_info=error)
                self.send(output.generation_id, _cancel(output.generation_id))
                self.forget(output.generation_id)
                listener.on_lost(errors.Internal("the answer could not be turned into text"))


class Engines:
    """Attachments by address; without credentials in plain text."""

    def __init__(self, log: Log, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._log, self._credentials = log, credentials
        self._attachments: dict[str, Attachment] = {}
        self.lost_count = 0

    def at(self, address: str) -> Attachment:
        """The attachment to an engine, made where there is none."""
        attachment = self._attachments.get(address)
        if attachment is None or attachment.lost:
            attachment = self._attachments[address] = Attachment(address, self._log, self._lost, self._credentials)
        return attachment

    def _lost(self) -> None:
        self.lost_count += 1

    async def reachable(self, address: str) -> bool:
        """Whether an engine serves there now."""
        async with open_channel(address, self._credentials) as channel:
            try:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Ends every attachment."""
        await asyncio.gather(*(attachment.close() for attachment in self._attachments.values()))


def _cancel(generation_id: int, index: int | None = None) -> engine_pb2.AttachRequest:
    """A cancel of everything, or of one answer: that one is complete."""
    cancel = engine_pb2.CancelGeneration(generation_id=generation_id, index=index, complete=index is not None)
    return engine_pb2.AttachRequest(cancel=cancel)


def _first(group: BaseExceptionGroup[grpc.aio.AioRpcError]) -> grpc.aio.AioRpcError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, grpc.aio.AioRpcError):
        raise TypeError(type(error))
    return error
