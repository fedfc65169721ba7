"""What operators do: the protobuf edge of the admin port. Knows the gateway's parts, and no gRPC itself.

The port is one of its own, off unless it is set; its token is none of the API keys.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from typing import Any

from headrace.errors import InvalidArgument, Unauthenticated
from headrace.v1 import admin_pb2, admin_pb2_grpc, engine_pb2
from services.common.calls import Call
from services.common.logs import Log
from services.gateway.identity import AUTHORIZATION, REFUSAL, SCHEME, digest_of
from services.gateway.peers import Engines
from services.gateway.router import Router

FULL_NAME = "headrace.v1.AdminService"
MAX_PROFILE_STEPS = 10_000


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Flush, pause, resume, drain, configuration, profile.

    Args:
        engines: what they are told through.
        router: which there are.
        configuration: settings by name, secrets hidden.
        token: what a caller must show; "": nothing (the port is this machine's own).
        log: each verb is a line.
    """

    def __init__(
        self, engines: Engines, router: Router, configuration: Mapping[str, str], token: str, log: Log
    ) -> None:
        self._engines, self._router, self._log = engines, router, log
        self._configuration, self._token = configuration, token

    async def FlushPrefixCache(  # noqa: N802
        self, request: admin_pb2.FlushPrefixCacheRequest, call: Call
    ) -> admin_pb2.FlushPrefixCacheResponse:
        """Forgets cached prefixes, in the engines and in the router's index of them."""
        addresses = self._chosen(request.engine_address, call)
        verb = engine_pb2.EngineServiceFlushPrefixCacheRequest()
        answers = await self._tell("FlushPrefixCache", addresses, verb, call)
        for address in addresses:
            self._router.index.forget(address)
        return admin_pb2.FlushPrefixCacheResponse(flushed_block_count=sum(a.flushed_block_count for a in answers))

    async def Pause(self, request: admin_pb2.PauseRequest, call: Call) -> admin_pb2.PauseResponse:  # noqa: N802
        """Stops scheduling."""
        addresses = self._chosen(request.engine_address, call)
        await self._tell("Pause", addresses, engine_pb2.EngineServicePauseRequest(), call)
        return admin_pb2.PauseResponse()

    async def Resume(self, request: admin_pb2.ResumeRequest, call: Call) -> admin_pb2.ResumeResponse:  # noqa: N802
        """Goes on scheduling."""
        addresses = self._chosen(request.engine_address, call)
        await self._tell("Resume", addresses, engine_pb2.EngineServiceResumeRequest(), call)
        return admin_pb2.ResumeResponse()

    async def Drain(self, request: admin_pb2.DrainRequest, call: Call) -> admin_pb2.DrainResponse:  # noqa: N802
        """Sends an engine nothing more; it ends when its last stream has ended."""
        (address,) = self._one(request.engine_address, call)
        self._router.engines[address].draining = True
        answers = await self._tell("Drain", [address], engine_pb2.EngineServiceDrainRequest(), call)
        return admin_pb2.DrainResponse(open_stream_count=answers[0].open_generation_count)

    async def GetConfiguration(  # noqa: N802
        self, request: admin_pb2.GetConfigurationRequest, call: Call
    ) -> admin_pb2.GetConfigurationResponse:
        """What is in force."""
        self._check(call)
        return admin_pb2.GetConfigurationResponse(settings=self._configuration)

    async def Profile(self, request: admin_pb2.ProfileRequest, call: Call) -> admin_pb2.ProfileResponse:  # noqa: N802
        """Records an engine's next steps."""
        addresses = self._one(request.engine_address, call)
        if not 1 <= request.step_count <= MAX_PROFILE_STEPS:
            raise InvalidArgument(
                f"step_count is {request.step_count}; expected 1 to {MAX_PROFILE_STEPS}", field="step_count"
            )
        verb = engine_pb2.EngineServiceProfileRequest(step_count=request.step_count)
        answers = await self._tell("Profile", addresses, verb, call)
        return admin_pb2.ProfileResponse(chrome_trace=answers[0].chrome_trace)

    def _check(self, call: Call) -> None:
        given = call.metadata.get(AUTHORIZATION, "")
        token = given[len(SCHEME) :].strip() if given.lower().startswith(SCHEME) else ""
        if self._token and not hmac.compare_digest(digest_of(token), digest_of(self._token)):
            raise Unauthenticated(REFUSAL)

    def _one(self, address: str, call: Call) -> list[str]:
        self._check(call)
        if not address:
            raise InvalidArgument("engine_address is empty; expected host:port of an engine", field="engine_address")
        return self._chosen(address, call)

    def _chosen(self, address: str, call: Call) -> list[str]:
        """The engine named, or all."""
        self._check(call)
        known = sorted(self._router.engines)
        if address and address not in known:
            raise InvalidArgument(
                f"engine_address is {address!r}; expected one of: {', '.join(known)}", field="engine_address"
            )
        return [address] if address else known

    async def _tell(self, verb: str, addresses: list[str], request: object, call: Call) -> list[Any]:
        self._log.info("admin", verb=verb, engines=addresses)
        return list(await asyncio.gather(*(self._engines.tell(a, verb, request, call.timeout_s()) for a in addresses)))
