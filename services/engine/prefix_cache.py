"""Which leading blocks of a prompt are already computed.

Knows block numbers, token ids and a salt; nothing of requests' fate or of tensors. A block's name is
a keyed chain: blake2b over (parent's name, the extras, its own token ids in fixed width), so a name stands for
the whole prefix. Tokens are compared as well before a block is believed.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from services.engine.block_pool import BlockPool
from services.engine.request import Request

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NAME_BYTES = 32
_ROOT_PERSON = b"headrace-kv-root"
_BLOCK_PERSON = b"headrace-kv-blk"


def root_name(model: str, salt: bytes) -> bytes:
    """The parent of a first block: the typed extras, each with its length, so that none runs into the next."""
    digest = blake2b(digest_size=_NAME_BYTES, person=_ROOT_PERSON)
    for tag, value in ((b"M", model.encode()), (b"S", salt)):
        digest.update(tag + len(value).to_bytes(8, "little") + value)
    return digest.digest()


def block_name(parent: bytes, token_ids: NDArray[np.int32]) -> bytes:
    """The name of a full block after its parent."""
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    return blake2b(parent + data, digest_size=_NAME_BYTES, person=_BLOCK_PERSON).digest()


class PrefixCache:
    """Finds and registers full blocks by the prefix that they complete."""

    def __init__(self, pool: BlockPool, block_size: int, *, model: str = "", enabled: bool = True) -> None:
        self._pool = pool
        self._block_size = block_size
        self._model = model
        self.enabled = enabled
        self._tokens = np.zeros((pool.block_count + 1, block_size), dtype=np.int32)
        self.queried_token_count = 0
        self.hit_token_count = 0

    def find(self, request: Request) -> list[int]:
        """Cached blocks that hold the request's leading tokens, in order; takes no reference.

        Stops at the first block that is missing, and always before the last known token, which must be
        computed to have logits.
        """
        if not self.enabled:
            return []
        size = self._block_size
        limit = request.reusable_count // size
        tokens = request.tokens.view
        found: list[int] = []
        for index in range(limit):
            block = self._pool.lookup(self._name(request, index))
            if block is None:
                break
            if not np.array_equal(self._tokens[block], tokens[index * size : (index + 1) * size]):
                break
            found.append(block)
        return found

    def promised(self, request: Request) -> list[bytes]:
        """Names of the full blocks that a running request has yet to compute from the tokens it knows."""
        if not self.enabled:
            return []
        size = self._block_size
        last = request.token_count // size
        return [self._name(request, index) for index in range(request.computed_count // size, last)]

    def wants(self, request: Request, hit_count: int) -> bytes | None:
        """Name of the first block that ``find`` did not return; None when no further hit could be used."""
        if not self.enabled or hit_count >= request.reusable_count // self._block_size:
            return None
        return self._name(request, hit_count)

    def count_query(self, request: Request, hit_token_count: int) -> None:
        """Note one admission for the hit ratio."""
        self.queried_token_count += request.token_count
        self.hit_token_count += hit_token_count

    def register(self, request: Request, computed_before: int) -> None:
        """Let the blocks that became full since ``computed_before`` tokens answer for their prefix."""
        if not self.enabled:
            return
        size = self._block_size
        for index in range(computed_before // size, request.computed_count // size):
            block = request.block_table[index]
            if self._pool.has_hash(block):
                continue
            name = self._name(request, index)
            if self._pool.set_hash(block, name):
                self._tokens[block] = request.tokens.view[index * size : (index + 1) * size]

    def forget_counts(self) -> None:
        """Start the hit ratio anew."""
        self.queried_token_count = 0
        self.hit_token_count = 0

    def flush(self) -> int:
        """Forget every block; how many were forgotten."""
        return self._pool.flush()

    def _name(self, request: Request, index: int) -> bytes:
        """The request's name for its full block ``index``, made once a request."""
        names, size = request.block_hashes, self._block_size
        while len(names) <= index:
            parent = names[-1] if names else root_name(self._model, request.cache_salt)
            start = len(names) * size
            names.append(block_name(parent, request.tokens.view[start : start + size]))
        return names[index]
