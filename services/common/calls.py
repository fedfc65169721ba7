"""What every call of every service goes through: tracing, errors, refusal while not ready. Knows no service.

A handler is `async def Method(self, request, call: Call)`; a streaming one sends with `await call.write(message)`.
It raises a `HeadraceError`, which the caller receives as a status with details. Whatever else escapes it is INTERNAL,
logged.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_status import rpc_status
from opentelemetry.trace import SpanKind

from headrace import errors
from services.common import metric_names, names, telemetry
from services.common.logs import Log
from services.common.propagation import REQUEST_ID_KEY

__all__ = ["REQUEST_ID_KEY", "SHUTDOWN_MESSAGE", "TRACE_ID_KEY", "Call", "CallInterceptor", "peer_error", "untraced"]

# Not ours, never refused, never traced.
LIBRARY_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.")
TRACE_ID_KEY = "headrace-trace-id"
GIVEN_UP_NS = 20_000_000  # a caller that leaves so shortly before its deadline has counted from an earlier moment
SHUTDOWN_MESSAGE = "the server is shutting down; retry elsewhere"
H = TypeVar("H", bound=Callable[..., Any])


def untraced(handler: H) -> H:
    """Marks a handler whose call has no span: it lasts for ever and carries many requests, which have their own."""
    handler.untraced = True  # type: ignore[attr-defined]
    return handler


class Call:
    """One call as its handler sees it.

    Attributes:
        method: full method name.
        span: the call's SERVER span; ended by the interceptor.
        arrival_ns: monotonic time of arrival.
        deadline_ns: monotonic time of the caller's deadline, None without one.
        metadata: the caller's text headers.
        trailing: headers to send with the status.
        answered: set by the handler before its last message: that the caller then goes away is no failure.
    """

    def __init__(
        self,
        method: str,
        context: grpc.aio.ServicerContext[Any, Any],
        telemetry_: telemetry.Telemetry,
        *,
        traced: bool = True,
    ) -> None:
        self.arrival_ns = time.monotonic_ns()
        self.method = method
        self._context = context
        self.metadata = {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
        left = context.time_remaining()
        self.deadline_ns = None if left is None or math.isinf(left) else self.arrival_ns + int(left * 1e9)
        self.trailing: list[tuple[str, str | bytes]] = []
        self.span = telemetry_.start(
            method.lstrip("/"),
            kind=SpanKind.SERVER,
            parent=telemetry.extract(self.metadata),
            start_ns=self.arrival_ns,
            attributes={names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method.lstrip("/")},
            kept=traced,
        )
        self.span.request_id = self.metadata.get(REQUEST_ID_KEY, "")[:64]
        self.task = asyncio.current_task()
        self.shut_down = False
        self.answered = False
        self._opening: asyncio.Future[None] | None = None

    async def write(self, message: Any) -> None:
        """Hands one message to the connection; waits while the peer's window is full.

        Raises:
            errors.Cancelled: the caller is gone.
        """
        try:
            sending = self._context.write(message)
            await (sending if self._opening else self._open(sending))
        except grpc.aio.UsageError:
            raise
        except Exception as error:
            raise errors.Cancelled("the caller went away") from error

    async def send_headers(self, headers: tuple[tuple[str, str], ...]) -> None:
        """Sends headers before the first message."""
        await self._open(self._context.send_initial_metadata(headers))

    async def _open(self, sending: Coroutine[Any, Any, None]) -> None:
        """Sends what carries the headers, to its end even if the handler is cancelled meanwhile.

        grpc.aio notes that headers are sent only afterwards: a status that comes before carries them again, and fails.
        """
        self._opening = asyncio.ensure_future(sending)
        await asyncio.shield(self._opening)

    async def abort(self, error: errors.HeadraceError) -> None:
        """Ends the call with the error's status, after what is being sent; always raises."""
        if self._opening is not None:
            await asyncio.wait({self._opening})
        status = rpc_status.to_status(errors.to_status(error))
        await self._context.abort(status.code, status.details, (*self.trailing, *status.trailing_metadata))

    @property
    def certificate_names(self) -> list[str]:
        """Names in the client certificate that the connection has proved; none without one."""
        proved = self._context.auth_context()
        keys = ("x509_common_name", "x509_subject_alternative_name")
        return [name.decode(errors="replace") for key in keys for name in proved.get(key, ())]

    @property
    def given_up(self) -> bool:
        """Whether a caller that leaves now does so because its time is up: it began to count before we did."""
        return self.deadline_ns is not None and time.monotonic_ns() >= self.deadline_ns - GIVEN_UP_NS

    def reason_of(self, raised: BaseException) -> str:
        """The reason, of the error catalogue, that an exception of the handler ends this call with; "": none."""
        raised = _told_of(raised)
        gone = isinstance(raised, asyncio.CancelledError | errors.Cancelled)
        if gone and self.answered:
            return ""
        if gone and self.shut_down:
            return errors.Reason.SHUTTING_DOWN
        if gone and self.given_up:
            return errors.Reason.DEADLINE_EXCEEDED
        if isinstance(raised, errors.HeadraceError):
            return raised.reason
        return errors.Reason.CANCELLED if gone else errors.Reason.INTERNAL

    def timeout_s(self, margin_s: float = 0.0) -> float | None:
        """Seconds left for a call further down, less a margin; None without a deadline."""
        if self.deadline_ns is None:
            return None
        return max(0.0, (self.deadline_ns - time.monotonic_ns()) / 1e9 - margin_s)

    def end_by_shutdown(self) -> None:
        """Ends the handler; its caller receives UNAVAILABLE."""
        self.shut_down = True
        if self.task is not None:
            self.task.cancel()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of ours.

    Args:
        telemetry_: spans.
        log: where faults go.
        refusal: an error while calls are refused (starting, shutting down), None while they are taken.
    """

    def __init__(
        self, telemetry_: telemetry.Telemetry, log: Log, refusal: Callable[[], errors.HeadraceError | None]
    ) -> None:
        self._telemetry, self._log, self._refusal = telemetry_, log, refusal
        self.open: set[Call] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        telemetry_.metrics.each_second(lambda: telemetry_.metrics.set(metric_names.CALLS_OPEN, len(self.open)))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler, wrapped."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(LIBRARY_SERVICES):
            return handler
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        behaviour = getattr(handler, kind)

        async def wrapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            return await self._run(method, behaviour, request, context)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return cast(
            "grpc.RpcMethodHandler[Any, Any]",
            make(
                wrapped,
                _reading(handler.request_deserializer, raises=bool(handler.request_streaming)),
                handler.response_serializer,
            ),
        )

    async def _run(
        self,
        method: str,
        behaviour: Callable[[Any, Call], Awaitable[Any]],
        request: Any | AsyncIterator[Any],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> Any:
        call = Call(method, context, self._telemetry, traced=not getattr(behaviour, "untraced", False))
        self.open.add(call)
        self.idle.clear()
        reason, status_name = "", "OK"
        try:
            refusal = self._refusal()
            if refusal is not None:
                raise refusal
            if isinstance(request, errors.HeadraceError):
                raise request
            response = await behaviour(request, call)
            context.set_trailing_metadata(tuple(call.trailing))
        except BaseException as raised:  # noqa: BLE001 - the one place where everything becomes a status
            error = self._translate(call, raised)
            if not (call.answered and isinstance(error, errors.Cancelled)):
                reason, status_name = error.reason, _status_name(error.code)
            await self._abort(call, error, raised)
        else:
            return response
        finally:
            call.span.set_attribute(names.RPC_STATUS, status_name)
            self._telemetry.end(call.span, error=reason)
            self._count(call, status_name)
            self.open.discard(call)
            if not self.open:
                self.idle.set()

    def _count(self, call: Call, status_name: str) -> None:
        self._telemetry.metrics.observe(
            metric_names.CALL_DURATION,
            (time.monotonic_ns() - call.arrival_ns) / 1e9,
            call.method.lstrip("/"),
            status_name,
            trace_id=telemetry.trace_id(call.span) if call.span.sampled else "",
        )

    def _translate(self, call: Call, raised: BaseException) -> errors.HeadraceError:
        """What the caller is told of whatever a handler raised."""
        raised = _told_of(raised)
        if isinstance(raised, errors.HeadraceError):
            return errors.DeadlineExceeded("the deadline has passed") if _timed_out(call, raised) else raised
        if isinstance(raised, asyncio.CancelledError):
            if call.shut_down:
                return errors.Unavailable(SHUTDOWN_MESSAGE, reason=errors.Reason.SHUTTING_DOWN)
            if call.given_up:
                return errors.DeadlineExceeded("the deadline has passed")
            if call.task is not None and call.task.cancelling():
                return errors.Cancelled("the caller went away")
        self._log.error(
            "call failed",
            method=call.method,
            trace_id=telemetry.trace_id(call.span),
            request_id=call.span.request_id,
            exc_info=raised,
        )
        return errors.Internal(f"{call.method}: internal error; trace {telemetry.trace_id(call.span)} has more")

    async def _abort(self, call: Call, error: errors.HeadraceError, raised: BaseException) -> None:
        """Ends the call with the error's status; always raises."""
        if isinstance(raised, asyncio.CancelledError) and not call.shut_down and not isinstance(error, errors.Internal):
            raise raised  # nobody is listening
        if call.task is not None:
            while call.task.uncancel():
                pass
        await call.abort(error)


def _reading(deserialize: Callable[[bytes], Any] | None, *, raises: bool) -> Callable[[bytes], Any]:
    """A deserializer for which bytes that are no message are the caller's fault.

    In a stream of requests the error comes out of the handler's iteration; alone, a request is read before there is a
    handler, so the error takes its place.
    """

    def read(data: bytes) -> Any:
        try:
            return data if deserialize is None else deserialize(data)
        except DecodeError:
            error = errors.InvalidArgument("the request cannot be read: broken wire format, or text that is not UTF-8")
            if raises:
                raise error from None
            return error

    return read


def _told_of(raised: BaseException) -> BaseException:
    """What the caller is told of tasks that failed together: a fault of ours, else the first error with a status."""
    if not isinstance(raised, BaseExceptionGroup):
        return raised
    each = [_told_of(one) for one in raised.exceptions]
    faults = [one for one in each if not isinstance(one, errors.HeadraceError | asyncio.CancelledError)]
    with_status = [one for one in each if isinstance(one, errors.HeadraceError)]
    return [*faults, *with_status, *each][0]


def _timed_out(call: Call, error: errors.HeadraceError) -> bool:
    return call.given_up and isinstance(error, errors.Cancelled)


def _status_name(code: int) -> str:
    return next((status.name for status in grpc.StatusCode if status.value[0] == code), str(code))


def peer_error(error: grpc.aio.AioRpcError, peer: str, address: str) -> errors.HeadraceError:
    """What a failed call to another process, a `peer` such as "tokenizer" at host:port, means to our own caller."""
    found = errors.from_call(error.code().value[0], error.details() or "", error.trailing_metadata())
    if isinstance(found, errors.Unavailable) and not _has_details(error):
        return errors.Unavailable(f"lost the {peer} at {address}; retry if nothing was received", lost_address=address)
    if isinstance(found, errors.Cancelled) and not _has_details(error):
        return errors.Unavailable(f"the {peer} at {address} ended the call", lost_address=address)
    if found.code == grpc.StatusCode.UNKNOWN.value[0]:
        return errors.Internal(f"the {peer} at {address} failed")
    return found


def _has_details(error: grpc.aio.AioRpcError) -> bool:
    return any(key == errors.STATUS_DETAILS_KEY for key, _ in error.trailing_metadata() or ())
