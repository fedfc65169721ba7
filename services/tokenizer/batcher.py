"""Encodes concurrent calls together, off the event loop.

The idea: nobody waits for a batch to fill. While one batch is being encoded the next callers gather, and
become the next batch. Inputs above `large_bytes` go one by one through a thread of their own, so that a huge prompt
delays only other huge ones. Tasks and threads are started with an empty context: no caller's trace clings
to them.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Self

from services.tokenizer.chat import ChatRenderer
from services.tokenizer.inputs import ChatInput, EncodeInput, InputError, TextInput, check_size
from services.tokenizer.lane import Batched, BatcherClosed, Encoded, Job, Lane, Worked
from services.tokenizer.vocabulary import Vocabulary

__all__ = ["BatcherClosed", "EncodeBatcher", "EncodeFailed", "Encoded", "QueueFull"]


class QueueFull(Exception):
    """Too much is waiting already; the caller may retry."""


class EncodeFailed(Exception):
    """The tokenizer failed on this one input; a fault of ours, not of the caller."""


class EncodeBatcher:
    """Use as `async with`, or `start` and `close`. One event loop; not thread-safe.

    Args:
        vocabulary: shared, immutable.
        renderer: None where the model has no chat template.
        max_batch_size: inputs in a batch.
        max_batch_bytes: UTF-8 bytes in a batch of several; bounds how long a batch can take.
        max_waiting: inputs that may wait or be at work.
        max_waiting_bytes: the same in bytes.
        large_bytes: inputs above this go through the thread for large ones.
        batched: told of each finished batch, on the event loop; see `Lane`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        renderer: ChatRenderer | None,
        *,
        max_batch_size: int = 64,
        max_batch_bytes: int = 131_072,
        max_waiting: int = 1024,
        max_waiting_bytes: int = 67_108_864,
        large_bytes: int = 16_384,
        batched: Batched | None = None,
    ) -> None:
        # Parallel encoding would run both lanes on one pool of threads and put small inputs behind large ones
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._vocabulary = vocabulary
        self._renderer = renderer
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._large_bytes = large_bytes
        self._small = Lane("encode", self._work, max_batch_size, max_batch_bytes, batched)
        self._large = Lane("encode-large", self._work, 1, max_batch_bytes, batched)
        self._waiting = 0
        self._waiting_bytes = 0
        self._running = False

    @property
    def waiting(self) -> int:
        """Inputs that wait or are at work now."""
        return self._waiting

    async def start(self) -> None:
        """Start the background tasks; encode a word, so that the first caller does not pay for warming up."""
        self._running = True
        self._small.start()
        self._large.start()
        await self.encode(TextInput("warm"))

    async def close(self) -> None:
        """End the background tasks; whoever waits gets BatcherClosed. Does not wait for a batch at work."""
        self._running = False
        await self._small.close()
        await self._large.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def encode(self, item: EncodeInput) -> Encoded:
        """Encode one input; see `encode_many`."""
        return (await self.encode_many([item]))[0]

    async def encode_many(self, items: Sequence[EncodeInput], tag: object = None) -> list[Encoded]:
        """Encode inputs, accepted all or none; cancelling the call withdraws what has not begun.

        `tag` says whose they are, to whoever is told of finished batches.

        Raises:
            InputError: an input is at fault (`index` says which, `field` where); the others are dropped.
            QueueFull: too much is waiting.
            EncodeFailed: the tokenizer failed on an input.
            BatcherClosed: not running, or closed meanwhile.
        """
        sizes = [self._checked_size(index, item) for index, item in enumerate(items)]
        self._admit(len(items), sum(sizes))
        loop, now_ns = asyncio.get_running_loop(), time.monotonic_ns()
        jobs = [Job(item, size, now_ns, loop.create_future(), tag) for item, size in zip(items, sizes, strict=True)]
        try:
            for job in jobs:
                self._lane(job.size_bytes).put(job)
            return [await self._result(index, job) for index, job in enumerate(jobs)]
        finally:
            self._withdraw(jobs)
            self._waiting -= len(items)
            self._waiting_bytes -= sum(sizes)

    async def decode(self, token_ids: Sequence[int], include_special_tokens: bool = False) -> str:
        """Decode ids off the loop.

        Raises:
            UnknownTokenId: an id is outside the vocabulary.
            QueueFull: too much is waiting.
            BatcherClosed: not running.
        """
        size = 8 * len(token_ids)
        self._admit(1, size)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._lane(size).thread, self._vocabulary.decode, list(token_ids), include_special_tokens
            )
        finally:
            self._waiting -= 1
            self._waiting_bytes -= size

    def _checked_size(self, index: int, item: EncodeInput) -> int:
        try:
            return check_size(item, self._vocabulary.facts.max_input_bytes)
        except InputError as error:
            error.index = index
            raise

    def _admit(self, count: int, size_bytes: int) -> None:
        if not self._running:
            raise BatcherClosed("the tokenizer is not running")
        if self._waiting + count > self._max_waiting or self._waiting_bytes + size_bytes > self._max_waiting_bytes:
            raise QueueFull(f"{self._waiting} inputs of {self._waiting_bytes} bytes are waiting to be encoded")
        self._waiting += count
        self._waiting_bytes += size_bytes

    def _lane(self, size_bytes: int) -> "Lane":
        return self._large if size_bytes > self._large_bytes else self._small

    async def _result(self, index: int, job: Job) -> Encoded:
        try:
            return await job.future
        except InputError as error:
            error.index = index
            raise

    def _withdraw(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.future.cancel() or job.future.cancelled():
                self._lane(job.size_bytes).remove(job)
            else:
                job.future.exception()  # seen: an earlier input's error is the one that is raised

    def _work(self, items: Sequence[EncodeInput]) -> Worked:
        """Render and encode a batch, on a lane's thread. An input's failure is its own result."""
        began_ns = time.monotonic_ns()
        results: list[list[int] | Exception] = [EncodeFailed("not encoded")] * len(items)
        plain: list[tuple[int, str]] = []
        marked: list[tuple[int, str]] = []
        for place, item in enumerate(items):
            if isinstance(item, TextInput):
                plain.append((place, item.text))
                continue
            try:
                marked.append((place, self._render(item)))
            except Exception as error:  # noqa: BLE001 - handed to the caller whose input it is
                results[place] = error
        _encode_each(plain, self._vocabulary.encode_texts, results)
        _encode_each(marked, self._vocabulary.encode_marked, results)
        return Worked(results, began_ns, time.monotonic_ns())

    def _render(self, chat: ChatInput) -> str:
        if self._renderer is None:
            raise InputError("the model has no chat template; send text or token ids")
        return self._renderer.render(chat)


def _encode_each(
    texts: Sequence[tuple[int, str]],
    encode: Callable[[Sequence[str]], list[list[int]]],
    results: list[list[int] | Exception],
) -> None:
    """Encode (place, text) pairs together into `results`; if that fails, one by one."""
    if not texts:
        return
    try:
        for (place, _), ids in zip(texts, encode([text for _, text in texts]), strict=True):
            results[place] = ids
    except BaseException as error:  # noqa: BLE001 - a panic in the library is no Exception
        if len(texts) == 1:
            results[texts[0][0]] = EncodeFailed(f"the tokenizer failed ({type(error).__name__})")
            return
        for one in texts:
            _encode_each([one], encode, results)
