"""Which engine has computed which prefix, as far as this gateway has sent it there. Knows no engine's real cache.

Prompts are cut into blocks, and each block is named by itself and all before it, so two prompts have the same names as
far as they begin alike. For each engine the names that were sent to it are kept, the least recently used forgotten
first, as many as its cache holds blocks: what the engine itself would keep, nearly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_BLOCKS = 512  # of one prompt; what comes after says little more
DEFAULT_CAPACITY = 4096


class PrefixIndex:
    """Names of blocks by engine.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int = 16) -> None:
        self._block_size = block_size
        self._sent: dict[str, OrderedDict[int, None]] = {}

    def names(self, salt: bytes, token_ids: Sequence[int]) -> list[int]:
        """Names of the full blocks of a prompt, in order; prompts under different salts share none."""
        size, name, result = self._block_size, hash(salt), []
        for start in range(0, min(len(token_ids), MAX_BLOCKS * size) - size + 1, size):
            name = hash((name, *token_ids[start : start + size]))
            result.append(name)
        return result

    def predict(self, engine: str, names: Sequence[int]) -> int:
        """Tokens of a prompt that an engine probably has."""
        sent, count = self._sent.get(engine), 0
        if sent is not None:
            for name in names:
                if name not in sent:
                    break
                count += 1
        return count * self._block_size

    def learn(self, engine: str, names: Sequence[int], capacity: int = 0) -> None:
        """A prompt was sent to an engine whose cache holds `capacity` blocks."""
        sent = self._sent.setdefault(engine, OrderedDict())
        for name in reversed(names):  # tails are forgotten before heads
            sent[name] = None
            sent.move_to_end(name)
        while len(sent) > (capacity or DEFAULT_CAPACITY):
            sent.popitem(last=False)

    def forget(self, engine: str) -> None:
        """An engine's cache is empty: it is new, or was flushed."""
        self._sent.pop(engine, None)
