"""In Jaeger's place: takes spans over OTLP on 4317, answers `/api/traces/<id>` on 16686 with names alone."""

from __future__ import annotations

import collections
import http.server
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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


def credentials() -> grpc.ServerCredentials:
    """TLS by the variables that Jaeger reads too; callers need a certificate."""
    key, chain, authority = [
        Path(os.environ[f"COLLECTOR_OTLP_GRPC_TLS_{name}"]).read_bytes() for name in ("KEY", "CERT", "CLIENT_CA")
    ]
    return grpc.ssl_server_credentials([(key, chain)], authority, require_client_auth=True)


def main() -> None:
    """Receives until it is told to stop."""
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Receiver(), server)
    if os.environ.get("COLLECTOR_OTLP_GRPC_TLS_ENABLED") == "true":
        server.add_secure_port("0.0.0.0:4317", credentials())
    else:
        server.add_insecure_port("0.0.0.0:4317")
    server.start()
    web = http.server.ThreadingHTTPServer(("0.0.0.0", 16686), Query)  # noqa: S104 - inside a container
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=web.shutdown).start())
    web.serve_forever()
    server.stop(0)


if __name__ == "__main__":
    main()
