"""A real OTLP receiver: a gRPC server that keeps every span it is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as it came over the wire. Ids in hexadecimal, times in epoch nanoseconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    status: int  # 0 unset, 1 ok, 2 error
    attributes: dict[str, object]


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Spans by trace id. `endpoint` is what services are told. With credentials it speaks TLS."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self._spans: list[ReceivedSpan] = []
        self._arrived = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        if credentials is None:
            self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        else:
            self.endpoint = f"http://localhost:{self._server.add_secure_port('127.0.0.1:0', credentials)}"
        self._server.start()

    def Export(self, request, context):
        spans = [
            _received(resource, span)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._arrived:
            self._spans += spans
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of a trace that have arrived by now."""
        with self._arrived:
            return [span for span in self._spans if span.trace_id == trace_id]

    def everything(self) -> list[ReceivedSpan]:
        """Every span that has arrived by now."""
        with self._arrived:
            return list(self._spans)

    def wait_for(self, trace_id: str, complete: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """The spans of a trace once they are complete; at most 10 s, then whatever has arrived."""
        deadline = time.monotonic() + 10
        with self._arrived:
            while True:
                spans = [span for span in self._spans if span.trace_id == trace_id]
                left = deadline - time.monotonic()
                if complete(spans) or left <= 0:
                    return spans
                self._arrived.wait(left)

    def stop(self) -> None:
        self._server.stop(0).wait()


def _received(resource, span) -> ReceivedSpan:
    names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    return ReceivedSpan(
        service=names["service.name"],
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=span.status.code,
        attributes={pair.key: _value(pair.value) for pair in span.attributes},
    )


def _value(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
