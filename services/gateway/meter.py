"""Keeps each request's account, whatever becomes of Redis or of the caller. Knows no gRPC.

A decision takes at most `decision_s`. If Redis does not answer by then, this gateway decides alone, by a share of the
limits, and asks Redis again a second later. Calls to Redis are tasks of their own: a caller that leaves cuts none
in two. Settling happens in the background and is repeated until Redis has taken it; once, because it is idempotent.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import HeadraceError
from services.common import metric_names
from services.common.logs import Log
from services.common.metrics import Metrics
from services.common.shared import SharedStateLost
from services.gateway.identity import Identity
from services.gateway.quota import Charge, MemoryQuotas, Quotas, Refusal, Usage
from services.gateway.redis_quota import RedisQuotas

LATE_S = 0.005  # a timer that is later than this says that the event loop was busy
PATIENCE_S = 1.0
RETRY_S = 1.0
MAX_UNSETTLED = 100_000
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
        self._unsettled: deque[tuple[Charge, Usage | None]] = deque()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ask_at = self._answered_at = 0.0
        self.reachable = True
        self.lost_count = 0

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
        refusal = await self._shielded(lease)
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
            self._settle(lease, usage)

    async def _shielded(self, lease: _Lease) -> Refusal | None:
        deciding = self._spawn(self._decide(lease))
        try:
            return await asyncio.shield(deciding)
        except asyncio.CancelledError:
            deciding.add_done_callback(lambda _: self._settle(lease, None))
            raise

    async def _decide(self, lease: _Lease) -> Refusal | None:
        if self._shared is not None and time.monotonic() >= self._ask_at:
            asked = self._spawn(self._shared.reserve(lease.charge, lease.usage))
            if not self.reachable:
                self._ask_at = time.monotonic() + RETRY_S  # one asks, the others do not wait for it
            try:
                refusal = await self._in_time(asked)
            except (SharedStateLost, TimeoutError) as error:
                self._unreachable(str(error) or type(error).__name__)
            else:
                self._reached()
                return refusal
        share = self._share if self._shared is not None else 1.0
        lease.local = replace(lease.charge, limits=lease.charge.limits.scaled(share))
        refusal = await self._local.reserve(lease.local)
        if refusal is not None and self._shared is not None:
            self._queue(lease.charge, None)  # a late answer of Redis may still have granted it
        return refusal

    async def _in_time(self, asked: asyncio.Task[Refusal | None]) -> Refusal | None:
        """Redis' answer. While it answers others it is this process that is slow, and waiting is right."""
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            began = time.monotonic()
            done, _ = await asyncio.wait({asked}, timeout=self._decision_s)
            if done:
                return asked.result()
            now = time.monotonic()
            late = now - began > self._decision_s + LATE_S or now - self._answered_at < self._decision_s
            if not self.reachable or not late or now > give_up_at:
                raise TimeoutError

    def _settle(self, lease: _Lease, usage: Usage | None) -> None:
        if lease.local is not None:
            self._spawn(self._local.settle(lease.local, usage))
        if self._shared is not None:
            self._queue(lease.charge, usage)

    def _queue(self, charge: Charge, usage: Usage | None) -> None:
        if len(self._unsettled) >= MAX_UNSETTLED:
            self._unsettled.popleft()
            self.lost_count += 1
        self._unsettled.append((charge, usage))
        self._wake.set()

    async def run(self) -> None:
        """Settles, renews and sweeps, for ever."""
        if self._shared is None:
            return
        try:
            await self._shared.warm_up()
        except SharedStateLost as error:
            self._unreachable(str(error))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._settle_for_ever(self._shared))
            group.create_task(self._renew_for_ever(self._shared))

    async def _settle_for_ever(self, shared: Quotas) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._unsettled:
                began = time.monotonic()
                try:
                    await shared.settle(*self._unsettled[0])
                except SharedStateLost as error:
                    self._unreachable(str(error))
                    await asyncio.sleep(RETRY_S)
                else:
                    self._unsettled.popleft()
                    if time.monotonic() - began < self._decision_s:
                        self._reached()

    async def _renew_for_ever(self, shared: RedisQuotas) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                for lease in list(self._open.values()):
                    await shared.renew(lease.charge, lease.usage)
                await shared.sweep()
            except SharedStateLost as error:
                self._unreachable(str(error))

    def _unreachable(self, why: str) -> None:
        self._ask_at = time.monotonic() + RETRY_S
        if self.reachable:
            self._log.warning("shared state does not answer; this gateway decides alone", reason=why, share=self._share)
        self.reachable = False
        self._metrics.set(metric_names.SHARED_STATE_REACHABLE, 0)

    def _reached(self) -> None:
        self._answered_at = time.monotonic()
        if not self.reachable:
            self._log.info("shared state answers again", unsettled=len(self._unsettled))
        self.reachable = True
        self._metrics.set(metric_names.SHARED_STATE_REACHABLE, 1)

    async def close(self, timeout_s: float = 0.5) -> None:
        """Settles what is left, as far as Redis takes it in time."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s / 2)
        if self._shared is not None:
            with contextlib.suppress(SharedStateLost, TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while self._unsettled:
                        await self._shared.settle(*self._unsettled[0])
                        self._unsettled.popleft()
            await self._shared.close()
        await self._local.close()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # heard by whoever still waits; a late one is nobody's
