"""Keeps each request's account, whatever becomes of Redis or of the caller. Knows no gRPC.

A decision takes at most `decision_s`. If Redis does not answer by then, this gateway decides alone, by a share of the
limits, and asks Redis again a second later. What is asked of Redis is sent whole: a caller that leaves cuts nothing in
two, and its lease is settled as any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from headrace.errors import HeadraceError
from services.common import metric_names
from services.common.logs import Log
from services.common.metrics import Metrics
from services.common.shared import SharedStateLost
from services.gateway.identity import Identity
from services.gateway.quota import Charge, MemoryQuotas, Refusal, Usage
from services.gateway.redis_quota import Answer, RedisQuotas, refusal_of
from services.gateway.settlements import Settlements

LATE_S = 0.005  # a timer that is later than this says that the event loop was busy
PATIENCE_S = 1.0
RETRY_S = 1.0
NO_FAULT_OF_THEIRS = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "SLOW_CONSUMER"})


@dataclass(slots=True)
class _Lease:
    charge: Charge
    usage: Usage
    local: Charge | None = None  # what was reserved here, where Redis did not answer


class Meter:
    """Reserves and settles.

    Args:
        shared: what several gateways share; None: this one is alone.
        local: decides where `shared` does not answer, or is not there.
        share: of the limits that this gateway grants alone.
        metrics: counts refusals, and whether shared state answers.
        log: told when it does not, and when it does again.
        decision_s: seconds that a decision may wait for `shared`.
        renew_s: seconds between renewals of leases.
    """

    def __init__(
        self,
        shared: RedisQuotas | None,
        local: MemoryQuotas,
        share: float,
        metrics: Metrics,
        log: Log,
        *,
        decision_s: float = 0.045,
        renew_s: float = 10.0,
    ) -> None:
        self._shared, self._local, self._share = shared, local, share
        self._metrics, self._log = metrics, log
        self._decision_s, self._renew_s = decision_s, renew_s
        self._open: dict[str, _Lease] = {}
        self._settlements = Settlements(shared, self._reached, self._unreachable) if shared is not None else None
        self._ask_at = self._answered_at = 0.0
        self._away = asyncio.Event()
        self.reachable = True

    @contextlib.asynccontextmanager
    async def hold(self, identity: Identity, usage: Usage, token_count: int) -> AsyncIterator[Usage]:
        """Holds what a request may need; in the end charges what `usage` says then.

        Raises:
            ResourceExhausted: a limit is reached; nothing is charged.
        """
        if not identity.key_id:
            yield usage
            return
        lease = _Lease(Charge(usage.request_id, identity.key_id, identity.limits, token_count), usage)
        try:
            refusal = await self._decide(lease)
        except asyncio.CancelledError:
            await self._settle(lease, None)
            raise
        if refusal is not None:
            self._metrics.add(metric_names.QUOTA_REFUSED, 1, identity.tenant, refusal.limit)
            raise refusal.error()
        self._open[usage.request_id] = lease
        try:
            yield usage
        except BaseException as raised:
            usage.outcome = raised.reason if isinstance(raised, HeadraceError) else "CANCELLED"
            if usage.outcome not in NO_FAULT_OF_THEIRS and not usage.completion_tokens:
                usage.prompt_tokens = 0
            raise
        finally:
            del self._open[usage.request_id]
            usage.ended_at = time.time()
            await self._settle(lease, usage)

    async def _decide(self, lease: _Lease) -> Refusal | None:
        if self._shared is not None and time.monotonic() >= self._ask_at:
            asked = self._shared.ask(lease.charge, lease.usage)
            if not self.reachable:
                self._ask_at = time.monotonic() + RETRY_S  # one asks, the others do not wait for it
            try:
                answer = await self._in_time(asked)
            except (SharedStateLost, TimeoutError) as error:
                self._unreachable(str(error) or type(error).__name__)
            else:
                self._reached()
                return refusal_of(lease.charge, answer)
        share = self._share if self._shared is not None else 1.0
        lease.local = replace(lease.charge, limits=lease.charge.limits.scaled(share))
        refusal = await self._local.reserve(lease.local)
        if refusal is not None and self._settlements is not None:
            self._settlements.add(lease.charge, None)  # a late answer of Redis may still have granted it
        return refusal

    async def _in_time(self, asked: asyncio.Future[Answer]) -> Answer:
        """Redis' answer. While it answers others it is this process that is slow, and waiting is right."""
        loop, give_up_at = asyncio.get_running_loop(), time.monotonic() + PATIENCE_S
        timer: asyncio.TimerHandle

        def look(began: float) -> None:
            nonlocal timer
            now = time.monotonic()
            late = now - began > self._decision_s + LATE_S or now - self._answered_at < self._decision_s
            if self.reachable and late and now < give_up_at:
                timer = loop.call_later(self._decision_s, look, now)
            elif not asked.done():
                asked.set_exception(TimeoutError())

        timer = loop.call_later(self._decision_s, look, time.monotonic())
        try:
            return await asked
        finally:
            timer.cancel()

    async def _settle(self, lease: _Lease, usage: Usage | None) -> None:
        """Never suspends, so that it is done whoever was cancelled."""
        if lease.local is not None:
            await self._local.settle(lease.local, usage)
        if self._settlements is not None:
            self._settlements.add(lease.charge, usage)

    async def run(self) -> None:
        """Renews, sweeps and heals, for ever."""
        if self._shared is None:
            return
        self._metrics.set(metric_names.SHARED_STATE_REACHABLE, 1)
        try:
            await self._shared.ping()
        except SharedStateLost as error:
            self._unreachable(str(error))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew_for_ever(self._shared))
            group.create_task(self._heal_for_ever(self._shared))

    async def _renew_for_ever(self, shared: RedisQuotas) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                for lease in list(self._open.values()):
                    await shared.renew(lease.charge, lease.usage)
                await shared.sweep()
            except SharedStateLost as error:
                self._unreachable(str(error))

    async def _heal_for_ever(self, shared: RedisQuotas) -> None:
        """Asks Redis again while it is away, so that it is found without a request too."""
        while True:
            await self._away.wait()
            await asyncio.sleep(RETRY_S)
            began = time.monotonic()
            with contextlib.suppress(SharedStateLost):
                await shared.ping()
                self._reached(time.monotonic() - began)

    def _unreachable(self, why: str) -> None:
        self._ask_at = time.monotonic() + RETRY_S
        if self.reachable:
            self._log.warning("shared state does not answer; this gateway decides alone", reason=why, share=self._share)
            self.reachable = False
            self._away.set()
            self._metrics.set(metric_names.SHARED_STATE_REACHABLE, 0)

    def _reached(self, took_s: float = 0.0) -> None:
        """Redis has answered; in time, if it is to be asked again."""
        if took_s >= self._decision_s:
            return
        self._answered_at = time.monotonic()
        if not self.reachable:
            self._log.info("shared state answers again", unsettled=self.unsettled_count)
            self.reachable = True
            self._away.clear()
            self._metrics.set(metric_names.SHARED_STATE_REACHABLE, 1)

    @property
    def unsettled_count(self) -> int:
        """Endings that Redis has not taken yet."""
        return len(self._settlements) if self._settlements is not None else 0

    async def close(self, timeout_s: float = 0.5) -> None:
        """Settles what is left, as far as Redis takes it in time."""
        if self._shared is not None and self._settlements is not None:
            await self._settlements.drain(timeout_s)
            await self._shared.close()
        await self._local.close()
