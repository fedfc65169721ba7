"""Which engine has computed which prefix: what this gateway has sent there, corrected by what the engine found.

Prompts are cut into blocks, and each block is named by itself and all before it, so two prompts have the same names as
far as they begin alike. For each engine the names that were sent to it are kept, the least recently used forgotten
first, as many as its cache holds blocks: what the engine itself would keep, nearly. Each answer says how many tokens of
its prompt the engine had. If it had fewer than expected, it has given up what was used as long ago: that, and all that
was used before, is forgotten here too.
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
        self._sent: dict[str, OrderedDict[int, int]] = {}  # by engine: when each name was last used, oldest first
        self._uses = 0

    def names(self, salt: bytes, token_ids: Sequence[int]) -> list[int]:
        """Names of the full blocks of a prompt, in order; prompts under different salts share none."""
        size, name, result = self._block_size, hash(salt), []
        for start in range(0, min(len(token_ids), MAX_BLOCKS * size) - size + 1, size):
            name = hash((name, *token_ids[start : start + size]))
            result.append(name)
        return result

    def predict(self, engine: str, names: Sequence[int]) -> int:
        """Tokens of a prompt that an engine probably has."""
        return len(self._known(engine, names)) * self._block_size

    def _known(self, engine: str, names: Sequence[int]) -> list[int]:
        """When each of the leading names that an engine probably has was last used."""
        sent = self._sent.get(engine, OrderedDict())
        uses: list[int] = []
        for name in names:
            used = sent.get(name)
            if used is None:
                break
            uses.append(used)
        return uses

    def learn(self, engine: str, names: Sequence[int], capacity: int = 0) -> list[int]:
        """A prompt was sent to an engine whose cache holds `capacity` blocks; what `correct` wants to know later."""
        expected = self._known(engine, names)
        sent = self._sent.setdefault(engine, OrderedDict())
        self._uses += 1
        for name in reversed(names):  # tails are forgotten before heads
            sent[name] = self._uses
            sent.move_to_end(name)
        while len(sent) > (capacity or DEFAULT_CAPACITY):
            sent.popitem(last=False)
        return expected

    def correct(self, engine: str, expected: Sequence[int], cached_tokens: int) -> None:
        """A prompt has been answered, of which the engine had so many tokens; `expected` is what `learn` gave."""
        missed, sent = expected[-(-cached_tokens // self._block_size) :], self._sent.get(engine)
        while missed and sent and next(iter(sent.values())) <= max(missed):
            sent.popitem(last=False)

    def forget(self, engine: str) -> None:
        """An engine's cache is empty: it is new, or was flushed."""
        self._sent.pop(engine, None)
