"""Channels to other processes of ours, and waiting until they serve. Knows no service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace import channels
from services.common.logs import Log

SERVING = health_pb2.HealthCheckResponse.SERVING
LOG_INTERVAL_S = 5.0
RETRY_S = 0.1
WHY_TIMEOUT_S = 1.0


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A channel to another process of ours, with the options table of `headrace.channels`; plain text by default."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=channels.CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=channels.CHANNEL_OPTIONS)


async def watch_health(channel: grpc.aio.Channel, on_change: Callable[[bool], None]) -> None:
    """Reports whether the peer serves, at first and at each change, for ever; a lost peer does not serve."""
    stub = health_pb2_grpc.HealthStub(channel)
    while True:
        watch = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        try:
            async for answer in watch:
                on_change(answer.status == SERVING)
        except grpc.aio.AioRpcError:
            pass
        finally:
            watch.cancel()
        on_change(False)
        await asyncio.sleep(RETRY_S)


async def wait_until_serving(channel: grpc.aio.Channel, peer: str, address: str, log: Log) -> None:
    """Returns once the peer serves; says now and then what is waited for."""
    ready = asyncio.Event()
    watch = asyncio.ensure_future(watch_health(channel, lambda serving: ready.set() if serving else None))
    try:
        await wait_for(ready, peer, {address: channel}, log)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def wait_for(ready: asyncio.Event, peer: str, awaited: Mapping[str, grpc.aio.Channel], log: Log) -> None:
    """Returns once the event is set; says now and then what is waited for, and what each address answers instead."""
    while not ready.is_set():
        try:
            await asyncio.wait_for(ready.wait(), LOG_INTERVAL_S)
        except TimeoutError:
            reasons = [f"{address}: {await _why(channel)}" for address, channel in dict(awaited).items()]
            log.info("waiting", peer=peer, reason="; ".join(reasons))


async def _why(channel: grpc.aio.Channel) -> str:
    """Why a peer does not serve: its own word, or what becomes of a connection to it."""
    ask = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WHY_TIMEOUT_S)
    try:
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name((await ask).status))
    except grpc.aio.AioRpcError as error:
        return error.details() or error.code().name
