"""A GatewayService that says what a test tells it to, and remembers how each call ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from headrace import channels, errors
from headrace.v1 import engine_pb2, gateway_pb2, gateway_pb2_grpc, generation_pb2, timings_pb2
from tests.headrace.scripted_session import ScriptedSessions, abort

TRACE_ID = "0123456789abcdef0123456789abcdef"
TIMINGS = timings_pb2.StageTimings(
    total_ns=100_000_000,
    time_to_first_token_ns=40_000_000,
    admit_ns=1_000_000,
    tokenize_ns=2_000_000,
    route_ns=500_000,
    transit_ns=1_500_000,
    queue_ns=4_000_000,
    prefill_ns=30_000_000,
    first_delivery_ns=900_000,
    decode_ns=58_000_000,
    tail_ns=1_900_000,
    residual_ns=200_000,
    computed_token_count=20,
    cached_token_count=16,
    decode_step_count=3,
    inter_token_p50_ns=19_000_000,
    inter_token_p99_ns=21_000_000,
)


class ScriptedGateway(ScriptedSessions, gateway_pb2_grpc.GatewayServiceServicer):
    """Streams `texts`, then ends; with `endless`, repeats the last text until cancelled; with `error`, fails.

    Attributes:
        requests: every request received; `asked` is set at the first.
        ended: one entry a finished stream handler, "finished" or "cancelled".
        fail_after: deltas before `error`.
        finish: why a stream ends, "stop" or "length".
    """

    def __init__(self) -> None:
        super().__init__()
        self.texts = ["The ", "capital is ", "Paris."]
        self.endless = False
        self.error: errors.HeadraceError | None = None
        self.fail_after = 0
        self.finish = "stop"
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.asked = asyncio.Event()
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def Generate(self, request: Any, context: Any) -> gateway_pb2.GenerateResponse:
        await self._take(request, context)
        if self.endless:
            await self._forever()
        ending = generation_pb2.Ending(finish_reason=generation_pb2.FINISH_REASON_STOP, matched_token_id=2)
        answer = gateway_pb2.Answer(text="".join(self.texts), ending=ending, token_ids=[5, 6, 2])
        return gateway_pb2.GenerateResponse(answers=[answer], **self._rest(request))

    async def GenerateStream(self, request: Any, context: Any) -> None:
        await self._take(request, context, later=True)
        how = "cancelled"
        try:
            number = 0
            for text in self.texts[: self.fail_after] if self.error else self.texts:
                await context.write(self._delta(number, text))
                number += 1
            if self.error:
                await abort(context, self.error)
            while self.endless:
                await context.write(self._delta(number, self.texts[-1]))
                number += 1
                await asyncio.sleep(0)
            reason = generation_pb2.FinishReason.Value(f"FINISH_REASON_{self.finish.upper()}")
            ending = generation_pb2.Ending(finish_reason=reason, matched_stop="!")
            final = gateway_pb2.Final(endings=[ending], **self._rest(request))
            await context.write(gateway_pb2.GenerateStreamResponse(sequence_number=number, final=final))
            how = "finished"
        finally:
            self.ended.put_nowait(how)

    async def Tokenize(self, request: Any, context: Any) -> gateway_pb2.TokenizeResponse:
        await self._take(request, context)
        return gateway_pb2.TokenizeResponse(token_ids=[1, 2, 3])

    async def Detokenize(self, request: Any, context: Any) -> gateway_pb2.DetokenizeResponse:
        await self._take(request, context)
        return gateway_pb2.DetokenizeResponse(text="abc")

    async def ListModels(self, request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
        await self._take(request, context)
        return gateway_pb2.ListModelsResponse(models=[gateway_pb2.Model(name="tiny", context_length=64)])

    async def GetStats(self, request: Any, context: Any) -> gateway_pb2.GetStatsResponse:
        await self._take(request, context)
        stats = engine_pb2.EngineStats(
            running_count=2,
            kv_total_block_count=10,
            kv_free_block_count=4,
            resident_bytes=900_000_000,
            resident_weight_bytes=500_000_000,
            resident_kv_bytes=100_000_000,
            resident_file_bytes=80_000_000,
        )
        up = gateway_pb2.EngineState(
            address="127.0.0.1:1",
            reachable=True,
            model="tiny",
            stats=stats,
            dtype="bfloat16",
            quantization="none",
            kv_cache_dtype="int8",
        )
        return gateway_pb2.GetStatsResponse(engines=[up, gateway_pb2.EngineState(address="127.0.0.1:2")])

    async def _take(self, request: Any, context: Any, later: bool = False) -> None:
        self.requests.append(request)
        self.asked.set()
        self.headers.append({k: v for k, v in context.invocation_metadata() if isinstance(v, str)})
        if self.error and not later:
            await abort(context, self.error)

    async def _forever(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended.put_nowait("cancelled")
            raise

    def _delta(self, number: int, text: str) -> gateway_pb2.GenerateStreamResponse:
        delta = gateway_pb2.Delta(text=text, token_count=1, token_ids=[100 + number])
        return gateway_pb2.GenerateStreamResponse(sequence_number=number, delta=delta)

    def _rest(self, request: Any) -> dict[str, Any]:
        usage = generation_pb2.Usage(prompt_token_count=36, cached_token_count=16, completion_token_count=3)
        return {
            "usage": usage,
            "timings": TIMINGS,
            "request_id": request.generation.request_id or "server-id",
            "trace_id": TRACE_ID,
            "model": "tiny",
            "metadata": request.generation.metadata,
        }


class Endpoint:
    """Where a scripted gateway is served: a free port of this event loop, the same one after a restart."""

    def __init__(self, gateway: ScriptedGateway) -> None:
        self._gateway = gateway
        self._server: grpc.aio.Server | None = None
        self.target = "127.0.0.1:0"

    async def start(self) -> None:
        """Serves."""
        self._server = grpc.aio.server(options=channels.SERVER_OPTIONS)
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(self._gateway, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port(self.target)}"
        await self._server.start()

    async def stop(self) -> None:
        """Breaks every connection off."""
        if self._server is not None:
            await self._server.stop(None)


@asynccontextmanager
async def serving(gateway: ScriptedGateway) -> AsyncIterator[str]:
    """Serves it; gives host:port."""
    async with endpoint(gateway) as served:
        yield served.target


@asynccontextmanager
async def endpoint(gateway: ScriptedGateway) -> AsyncIterator[Endpoint]:
    """Serves it; gives what can be stopped and started again."""
    served = Endpoint(gateway)
    await served.start()
    try:
        yield served
    finally:
        await served.stop()
