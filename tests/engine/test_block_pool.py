"""Guarantees of the block pool."""

from __future__ import annotations

import random

import pytest

from services.engine.block_pool import BlockPool, OutOfBlocksError


def test_empty_blocks_are_reused_before_cached_ones() -> None:
    """Nothing cached is lost while an empty block exists."""
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.set_hash(first, b"a")
    pool.release([first, second])
    assert {*pool.allocate(2)} == {second, 3}
    assert pool.lookup(b"a") == first
    assert pool.allocate(1) == [first]
    assert pool.lookup(b"a") is None
    pool.check_integrity()


def test_cached_blocks_go_least_recently_used_first() -> None:
    """Eviction follows the order of release."""
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.set_hash(block, name)
    pool.release([blocks[1], blocks[2], blocks[0]])
    pool.acquire(blocks[1])
    pool.release([blocks[1]])
    assert pool.allocate(3) == [blocks[2], blocks[0], blocks[1]]


def test_a_hit_keeps_the_block_from_being_handed_out() -> None:
    """An acquired cached block is in use until it is released as often."""
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.set_hash(block, b"a")
    pool.release([block])
    pool.acquire(block)
    pool.acquire(block)
    pool.release([block])
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)
    pool.release([block])
    assert pool.cached_count == 1


def test_misuse_is_refused_and_changes_nothing() -> None:
    """Too many releases, unknown numbers and acquiring an empty block are errors."""
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release([block])
    for misuse in (
        lambda: pool.release([block]),
        lambda: pool.release([0]),
        lambda: pool.release([3]),
        lambda: pool.acquire(block),
        lambda: pool.set_hash(block, b"a"),
    ):
        with pytest.raises(ValueError, match="block"):
            misuse()
    with pytest.raises(OutOfBlocksError):
        pool.allocate(3)
    pool.check_integrity()
    assert pool.free_count == 2


def test_one_hash_has_one_block() -> None:
    """A second block with the same content does not take the name."""
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.set_hash(first, b"a")
    assert not pool.set_hash(second, b"a")
    pool.release([first, second])
    assert (pool.cached_count, pool.free_count) == (1, 1)


def test_flush_forgets_names_of_used_and_cached_blocks() -> None:
    """After a flush nothing can be hit and nothing is lost."""
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.set_hash(first, b"a")
    pool.set_hash(second, b"b")
    pool.release([first])
    assert pool.flush() == 2
    assert pool.lookup(b"a") is None
    assert pool.lookup(b"b") is None
    pool.check_integrity()
    pool.release([second])
    assert pool.free_count == 3


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_random_operations_keep_every_invariant(seed: int) -> None:
    """Free + cached + used is the total, counts are never negative, and a naive model agrees."""
    draw = random.Random(seed)
    pool = BlockPool(24)
    references: dict[int, int] = {}
    names: dict[int, bytes] = {}
    serial = 0
    for operation in range(10_000):
        kind = draw.random()
        if kind < 0.35:
            count = draw.randint(0, 4)
            if count <= pool.reusable_count:
                for block in pool.allocate(count):
                    assert references.get(block, 0) == 0, "a block in use was handed out"
                    references[block] = 1
                    names.pop(block, None)
        elif kind < 0.65 and any(references.values()):
            block = draw.choice([b for b, n in references.items() if n])
            pool.release([block])
            references[block] -= 1
        elif kind < 0.8 and names:
            block = draw.choice(list(names))
            pool.acquire(block)
            references[block] = references.get(block, 0) + 1
        elif kind < 0.99:
            open_blocks = [b for b, n in references.items() if n and b not in names]
            if open_blocks:
                serial += 1
                names[draw.choice(open_blocks)] = str(serial).encode()
                block = next(b for b, name in names.items() if name == str(serial).encode())
                assert pool.set_hash(block, names[block])
        else:
            assert pool.flush() == len(names)
            names.clear()
        assert pool.used_count == sum(1 for n in references.values() if n)
        assert all(pool.lookup(name) == block for block, name in names.items())
        if operation % 20 == 0:
            pool.check_integrity()
    pool.check_integrity()
