"""The workbench measured: how many requests a second it can make, and whether it sees a server that stalls.

`python -m headrace.bench.self_check` (or `make bench-self`). The server is a process that answers every request at once
with a prepared answer; for the stall it is stopped for six seconds in a minute, so a tenth of an open loop must wait.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import statistics
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio

from headrace import channels
from headrace.bench.load import workers
from headrace.bench.load.spec import Leg, LoadSpec
from headrace.bench.load.workers import Where
from headrace.bench.records import Record
from headrace.cli import output
from headrace.v1 import gateway_pb2, generation_pb2, timings_pb2

LEAST_REQUESTS_PER_S = 2_000.0
TOKENS = 4
CLIENTS = 32
RATE, MINUTE_S, STALL_AT_S, STALL_S = 50.0, 60.0, 30.0, 6.0
LATE_S = 0.1  # far above what the idle server takes
_SERVICE = "headrace.v1.GatewayService"


def _answers() -> tuple[bytes, bytes]:
    """A message with all tokens, and the final one."""
    delta = gateway_pb2.Delta(text="text", token_count=TOKENS)
    final = gateway_pb2.Final(
        endings=[generation_pb2.Ending(finish_reason=generation_pb2.FINISH_REASON_LENGTH)],
        usage=generation_pb2.Usage(prompt_token_count=16, completion_token_count=TOKENS),
        timings=timings_pb2.StageTimings(total_ns=1_000, time_to_first_token_ns=500, prefill_ns=500),
        trace_id="0" * 32,
    )
    return (
        gateway_pb2.GenerateStreamResponse(delta=delta).SerializeToString(),
        gateway_pb2.GenerateStreamResponse(sequence_number=1, final=final).SerializeToString(),
    )


async def _serve(ready: Connection) -> None:
    messages = _answers()

    async def generate(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    async def list_models(_request: bytes, _context: Any) -> bytes:
        return gateway_pb2.ListModelsResponse().SerializeToString()

    server = grpc.aio.server(options=channels.SERVER_OPTIONS)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "GenerateStream": grpc.unary_stream_rpc_method_handler(generate),
        "ListModels": grpc.unary_unary_rpc_method_handler(list_models),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ready.send(port)
    await asyncio.to_thread(ready.recv)
    await server.stop(None)


def _server(ready: Connection) -> None:
    asyncio.run(_serve(ready))


@contextmanager
def null_server() -> Iterator[tuple[str, int]]:
    """A server that does nothing, as (host:port, process id), for as long as the block lasts."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_server, args=(there,), daemon=True)
    process.start()
    try:
        yield f"127.0.0.1:{here.recv()}", process.pid or 0
        here.send(None)
    finally:
        process.join(5.0)
        if process.is_alive():
            process.kill()


def ceiling(target: str, requests: int) -> float:
    """Requests a second of one client process in a closed loop."""
    spec = LoadSpec("closed", (Leg(CLIENTS, requests=requests),), prompt="16", output=str(TOKENS))
    records, _ = workers.run(spec, Where(target, {}, 30.0), 1, lambda _requests, _tokens: None)
    return requests / (max(record.ended_s for record in records) - min(record.sent_s for record in records))


def stalled(target: str, pid: int) -> Sequence[Record]:
    """The records of a minute in which the server stood still for six seconds."""
    begun = threading.Event()

    def stall() -> None:
        begun.wait()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            threading.Event().wait(STALL_AT_S if number == signal.SIGSTOP else STALL_S)
            os.kill(pid, number)

    spec = LoadSpec("open", (Leg(RATE, MINUTE_S),), arrivals="constant", prompt="16", output=str(TOKENS))
    stalling = threading.Thread(target=stall)
    stalling.start()
    records, _ = workers.run(spec, Where(target, {}, 30.0), 1, lambda _requests, _tokens: begun.set())
    stalling.join()
    return records


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both; 0 where the tool is good enough."""
    parser = argparse.ArgumentParser(prog="headrace.bench.self_check", description="The workbench measured.")
    parser.add_argument("--requests", type=output.positive, default=6_000)
    parser.add_argument("--repeat", type=output.positive, default=3)
    arguments = parser.parse_args(argv)
    with null_server() as (target, pid):
        rates = [ceiling(target, arguments.requests) for _ in range(arguments.repeat)]
        records = stalled(target, pid)
    rate = statistics.median(rates)
    late = sum(record.ttft_s > LATE_S for record in records) / len(records)
    longest = max(record.ttft_s for record in records)
    console = output.stdout()
    console.print(f"ceiling {rate:.0f} requests/s (median of {len(rates)}; {LEAST_REQUESTS_PER_S:.0f} are wanted)")
    console.print(f"stall of {STALL_S:.0f} s in {MINUTE_S:.0f} s: seen by {late:.1%}, the longest {longest:.2f} s")
    good = rate >= LEAST_REQUESTS_PER_S and abs(late - STALL_S / MINUTE_S) < 0.01
    return output.OK if good else output.FAILED


if __name__ == "__main__":
    sys.exit(main())
