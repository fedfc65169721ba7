"""One queue, one task that takes batches from it, one thread that works on them.

Knows nothing of tokenizers: the work is a function from a batch's inputs to a result for each.
"""

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from services.tokenizer.inputs import EncodeInput


class BatcherClosed(Exception):
    """The batcher is not running, or was closed while the call waited."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One input's ids, and where its time went (monotonic clock)."""

    token_ids: list[int]  # may be empty: some characters have no token
    wait_ns: int  # from the call until its batch began
    encode_ns: int  # rendering and encoding, the whole batch
    batch_size: int  # inputs encoded together
    batch: object = None  # what `batched` made of the batch, the same for all of it


@dataclass(frozen=True, slots=True)
class Worked:
    """A finished batch: ids or an error for each input, in order."""

    results: list[list[int] | Exception]
    began_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """An input on its way; whoever waits holds the future, and may cancel it at any time."""

    item: EncodeInput
    size_bytes: int
    called_ns: int
    future: "asyncio.Future[Encoded]"
    tag: object = None  # whose it is; handed to `batched`


Batched = Callable[[Sequence[object], Worked], object]


class Lane:
    """Started and closed once, on one event loop.

    Args:
        name: of the thread.
        work: called on the thread; must not raise, failures are results.
        max_batch_size: inputs in a batch.
        max_batch_bytes: bytes in a batch of several; a single input may be larger.
        batched: called on the event loop with the tags of a finished batch; its result goes to each input.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[EncodeInput]], Worked],
        max_batch_size: int,
        max_batch_bytes: int,
        batched: Batched | None = None,
    ) -> None:
        self._batched = batched
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._work = work
        self._max_batch_size = max_batch_size
        self._max_batch_bytes = max_batch_bytes
        self._jobs: deque[Job] = deque()
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task, with an empty context."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(), context=contextvars.Context())

    async def close(self) -> None:
        """End the task; jobs that wait fail with BatcherClosed, a batch at work is not waited for."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        _fail(self._jobs)
        self.thread.shutdown(wait=False, cancel_futures=True)

    def put(self, job: Job) -> None:
        """Append a job; the caller awaits its future."""
        self._jobs.append(job)
        self._arrived.set()

    def remove(self, job: Job) -> None:
        """Take a job out that nobody waits for; no-op once its batch has begun."""
        with contextlib.suppress(ValueError):
            self._jobs.remove(job)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            batch = self._take()
            if not batch:
                self._arrived.clear()
                continue
            try:
                worked = await loop.run_in_executor(self.thread, self._work, [job.item for job in batch])
            except asyncio.CancelledError:
                _fail(batch)
                raise
            about = self._batched([job.tag for job in batch], worked) if self._batched is not None else None
            _settle(batch, worked, about)

    def _take(self) -> list[Job]:
        """Take the next batch from the queue, oldest first."""
        batch: list[Job] = []
        size_bytes = 0
        while self._jobs and len(batch) < self._max_batch_size:
            size_bytes += self._jobs[0].size_bytes
            if batch and size_bytes > self._max_batch_bytes:
                break
            batch.append(self._jobs.popleft())
        return batch


def _settle(batch: Sequence[Job], worked: Worked, about: object) -> None:
    for job, result in zip(batch, worked.results, strict=True):
        if job.future.done():  # cancelled while its batch was at work
            continue
        if isinstance(result, Exception):
            job.future.set_exception(result)
        else:
            wait_ns, encode_ns = worked.began_ns - job.called_ns, worked.ended_ns - worked.began_ns
            job.future.set_result(Encoded(result, wait_ns, encode_ns, len(batch), about))


def _fail(jobs: Sequence[Job]) -> None:
    for job in jobs:
        if not job.future.done():
            job.future.set_exception(BatcherClosed("the tokenizer is shutting down"))
