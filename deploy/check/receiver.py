"""In Jaeger's place: takes spans over OTLP on 4317, answers `/api/traces/<id>` on 16686 with names alone."""

from __future__ import annotations

import collections
import http.server
import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

MAX_TRACES = 10_000
TRACES: collections.OrderedDict[str, list[dict[str, str]]] = collections.OrderedDict()
LOCK = threading.Lock()


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Keeps the name and the process of every span."""

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - a gRPC method
        """Takes a batch."""
        with LOCK:
            for resource in request.resource_spans:
                named = {a.key: a.value.string_value for a in resource.resource.attributes}
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    kept = {"operationName": span.name, "process": named.get("service.name", "")}
                    TRACES.setdefault(span.trace_id.hex(), []).append(kept)
            while len(TRACES) > MAX_TRACES:
                TRACES.popitem(last=False)
        return trace_service_pb2.ExportTraceServiceResponse()


class Query(http.server.BaseHTTPRequestHandler):
    """`GET /api/traces/<id>`: the spans of one trace."""

    def do_GET(self) -> None:
        """Answers."""
        with LOCK:
            spans = list(TRACES.get(self.path.rpartition("/")[2], []))
        body = json.dumps({"data": [{"spans": spans}] if spans else []}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by http.server
        """Says nothing."""


def main() -> None:
    """Receives until it is told to stop."""
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Receiver(), server)
    server.add_insecure_port("0.0.0.0:4317")
    server.start()
    web = http.server.ThreadingHTTPServer(("0.0.0.0", 16686), Query)  # noqa: S104 - inside a container
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=web.shutdown).start())
    web.serve_forever()
    server.stop(0)


if __name__ == "__main__":
    main()
