"""Which KV blocks are free, cached or in use.

Knows nothing of tensors, tokens or requests: only block numbers, reference counts and hashes.

    block 0 │ null: never handed out, never written, never read
    ────────┼───────────────────────────────────────────────────────────────
    used    │ reference count > 0 (with or without a hash)
    cached  │ reference count 0, has a hash: a future prefix hit, or the next victim
    free    │ reference count 0, no hash

Cached and free blocks share one doubly linked list, reused from its head: free blocks are put at the head,
cached ones at the tail, so nothing cached is lost while a free block exists, and then the least recently
used goes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

NULL_BLOCK = 0


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free; the caller should have looked first."""


class BlockPool:
    """Reference counts, the list of reusable blocks, and the hash of each cached one."""

    def __init__(self, block_count: int) -> None:
        """Make a pool of ``block_count`` usable blocks, numbered from 1."""
        if block_count < 1:
            raise ValueError(f"a block pool needs at least one block, not {block_count}")
        self.block_count = block_count
        total = block_count + 1
        self._references = np.zeros(total, dtype=np.int32)
        # The list runs through the blocks; entry 0 is its sentinel: next[0] is the head, prev[0] the tail.
        self._next = np.roll(np.arange(total, dtype=np.int32), -1)
        self._prev = np.roll(np.arange(total, dtype=np.int32), 1)
        self._hash: list[bytes | None] = [None] * total
        self._by_hash: dict[bytes, int] = {}
        self._reusable_count = block_count
        self._cached_count = 0

    @property
    def reusable_count(self) -> int:
        """Blocks that can be handed out now: free and cached."""
        return self._reusable_count

    @property
    def cached_count(self) -> int:
        """Unreferenced blocks that still answer a prefix hit."""
        return self._cached_count

    @property
    def free_count(self) -> int:
        """Unreferenced blocks with nothing worth keeping."""
        return self._reusable_count - self._cached_count

    @property
    def used_count(self) -> int:
        """Blocks with at least one reference."""
        return self.block_count - self._reusable_count

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with one reference each, forgetting what they had cached.

        Raises:
            OutOfBlocksError: fewer are reusable; nothing has changed.
        """
        if count > self._reusable_count:
            raise OutOfBlocksError(f"{count} blocks wanted, {self._reusable_count} reusable")
        blocks = []
        for _ in range(count):
            block = int(self._next[NULL_BLOCK])
            self._unlink(block)
            self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds this hash, used or cached; changes nothing."""
        return self._by_hash.get(block_hash)

    def is_reusable(self, block: int) -> bool:
        """True when nobody references the block."""
        return bool(self._references[block] == 0)

    def acquire(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        self._check_number(block)
        if self._references[block] == 0:
            if self._hash[block] is None:
                raise ValueError(f"block {block} is free: it must be allocated, not acquired")
            self._unlink(block)
            self._cached_count -= 1
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block, in the order in which they may be reused (tails first)."""
        for block in blocks:
            self._check_number(block)
            if self._references[block] <= 0:
                raise ValueError(f"block {block} is released more often than it was acquired")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hash[block] is None:
                    self._link_after(NULL_BLOCK, block)
                else:
                    self._link_after(int(self._prev[NULL_BLOCK]), block)
                    self._cached_count += 1

    def set_hash(self, block: int, block_hash: bytes) -> bool:
        """Let a used, full block answer for a hash; False when another block already does."""
        self._check_number(block)
        if self._references[block] == 0 or self._hash[block] is not None:
            raise ValueError(f"block {block} is not in use, or has a hash already")
        if block_hash in self._by_hash:
            return False
        self._by_hash[block_hash] = block
        self._hash[block] = block_hash
        return True

    def has_hash(self, block: int) -> bool:
        """True when the block answers for a hash."""
        return self._hash[block] is not None

    def flush(self) -> int:
        """Forget every hash, of used blocks too; how many were forgotten."""
        flushed = len(self._by_hash)
        for block in list(self._by_hash.values()):
            self._hash[block] = None
        self._by_hash.clear()
        self._cached_count = 0
        return flushed

    def check_integrity(self) -> None:
        """Hold every invariant of the regions drawn above.

        Raises:
            AssertionError: naming the first one broken.
        """
        listed: list[int] = []
        block, before = int(self._next[NULL_BLOCK]), NULL_BLOCK
        while block != NULL_BLOCK:
            _require(int(self._prev[block]) == before, f"the list is torn between {before} and {block}")
            _require(len(listed) < self.block_count, "the list of reusable blocks is a loop")
            listed.append(block)
            block, before = int(self._next[block]), block
        _require(int(self._prev[NULL_BLOCK]) == before, "the list's tail is wrong")
        _require(bool((self._references >= 0).all()), "a reference count is negative")
        _require(int(self._references[NULL_BLOCK]) == 0, "the null block is referenced")
        _require(self._hash[NULL_BLOCK] is None, "the null block has a hash")
        unreferenced = set((np.flatnonzero(self._references[1:] == 0) + 1).tolist())
        _require(set(listed) == unreferenced, "reusable blocks and unreferenced blocks differ")
        _require(len(listed) == self._reusable_count, "the count of reusable blocks is wrong")
        hashed = {b: h for b, h in enumerate(self._hash) if h is not None}
        _require({h: b for b, h in hashed.items()} == self._by_hash, "hashes and their index differ")
        _require(len(hashed) == len(self._by_hash), "two blocks answer for one hash")
        cached = sum(1 for b in listed if b in hashed)
        _require(cached == self._cached_count, "the count of cached blocks is wrong")
        _require(
            self.free_count + self.cached_count + self.used_count == self.block_count,
            "free + cached + used is not the total",
        )

    def reference_counts(self) -> list[int]:
        """References of each block, the null block's first; a copy, for checks."""
        counts: list[int] = self._references.tolist()
        return counts

    def _check_number(self, block: int) -> None:
        if not NULL_BLOCK < block <= self.block_count:
            raise ValueError(f"block {block} is outside 1..{self.block_count}")

    def _forget(self, block: int) -> None:
        block_hash = self._hash[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hash[block] = None
            self._cached_count -= 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._reusable_count -= 1

    def _link_after(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = block
        self._prev[block] = before
        self._next[block] = after
        self._prev[after] = block
        self._reusable_count += 1


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(f"block pool: {message}")
