"""Channels to other processes of ours, and waiting until they serve. Knows no service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace import channels
from services.common.logs import Log

SERVING = health_pb2.HealthCheckResponse.SERVING
LOG_INTERVAL_S = 5.0
RETRY_S = 0.1


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to another process of ours, with the options table of `headrace.channels`."""
    return grpc.aio.insecure_channel(address, options=channels.CHANNEL_OPTIONS)


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


async def wait_until_serving(channel: grpc.aio.Channel, peer: str, log: Log) -> None:
    """Returns once the peer serves; says now and then what is waited for."""
    ready = asyncio.Event()
    watch = asyncio.ensure_future(watch_health(channel, lambda serving: ready.set() if serving else None))
    try:
        await wait_for(ready, peer, log)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def wait_for(ready: asyncio.Event, peer: str, log: Log) -> None:
    """Returns once the event is set; says now and then what is waited for."""
    while not ready.is_set():
        try:
            await asyncio.wait_for(ready.wait(), LOG_INTERVAL_S)
        except TimeoutError:
            log.info("waiting", peer=peer)
