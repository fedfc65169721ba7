"""Decode steps as CUDA graphs: one replay instead of hundreds of launches. Knows batches; nothing of requests.

A graph is a recording for one number of tokens over fixed tensors. A step of decoded tokens is copied into these,
padded to the next recorded number; padding is a sequence of one token in the null block, whose result nobody reads.
Steps with chunks, and those larger than the largest graph, are computed eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from services.engine.kernels.triton.kernels import TritonBatch
from services.engine.model.decoder import Decoder

Compute = Callable[[], torch.Tensor]
Replay = Callable[[], torch.Tensor]
"""Computes anew over the same tensors; its result is always the same tensor, overwritten."""
Recorder = Callable[[Compute], Replay]


def graph_sizes(most: int) -> list[int]:
    """Numbers of tokens that are recorded, the largest first: 1, 2, 4, then steps of 8, later of a quarter at most."""
    sizes = {size for size in (1, 2, 4) if size <= most} | {most}
    size = 8
    while size < most:
        sizes.add(size)
        size += max(8, 1 << (size.bit_length() - 3))
    return sorted(sizes, reverse=True)


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, so that the largest, recorded first, pays for all."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch has no types here

    def __call__(self, compute: Compute) -> Replay:
        """Compute once for real, which compiles kernels and makes workspaces, then record."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class GraphedDecoder:
    """A decoder with its decode steps recorded: the same face as ``Decoder``."""

    def __init__(self, decoder: Decoder, sizes: list[int], widest: int, device: torch.device) -> None:
        """Make the fixed tensors.

        Args:
            decoder: computes.
            sizes: numbers of tokens to record, the largest first.
            widest: blocks of the longest context.
            device: of the decoder.
        """
        most = sizes[0]
        self._decoder, self._sizes = decoder, sizes
        self._replays: dict[int, Replay] = {}
        self.weight_bytes = decoder.weight_bytes
        own = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._starts, self._tiles = own, own[:most, None].repeat(1, 2)
        self._no_tiles = torch.empty((0, 2), dtype=torch.int32, device=device)
        self._token_ids, self._positions, self._contexts = torch.zeros((3, most), dtype=torch.int32, device=device)
        self._slots = torch.zeros(most, dtype=torch.int64, device=device)
        self._tables = torch.zeros((most, widest), dtype=torch.int32, device=device)
        self._pad(0, most)

    @torch.inference_mode()
    def record(self, kv: list[torch.Tensor], recorder: Recorder, most: int | None = None) -> None:
        """Record every size over this pool, or the ``most`` largest alone; earlier recordings are forgotten.

        The largest is first. Afterwards the null block holds zeros.
        """
        self._replays.clear()
        for size in self._sizes[:most]:
            batch = TritonBatch(
                self._starts[: size + 1], self._contexts[:size], self._tables[:size], self._tiles[:size], self._no_tiles
            )
            inputs = (self._token_ids[:size], self._positions[:size], self._slots[:size])
            self._replays[size] = recorder(partial(self._decoder.forward, *inputs, kv=kv, batch=batch))
        for layer in kv:
            layer[0].zero_()

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: list[torch.Tensor],
        batch: TritonBatch,
    ) -> torch.Tensor:
        """Compute T tokens through every layer, as ``Decoder.forward``; the result is good until the next call."""
        count = token_ids.shape[0]
        size = min((size for size in self._replays if size >= count), default=0)
        if not size or batch.chunk_tiles.shape[0]:
            return self._decoder.forward(token_ids, positions, slots, kv, batch)
        self._token_ids[:count] = token_ids
        self._positions[:count] = positions
        self._slots[:count] = slots
        self._contexts[:count] = batch.context_lens
        self._tables[:count, : batch.block_tables.shape[1]] = batch.block_tables
        self._pad(count, size)
        return self._replays[size]()[:count]

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """As ``Decoder.logits``."""
        return self._decoder.logits(hidden, rows)

    def _pad(self, start: int, end: int) -> None:
        """Make padding of rows: one token at position 0, in the first slot of the null block."""
        for fixed in (self._token_ids, self._positions, self._slots, self._tables):
            fixed[start:end].zero_()
        self._contexts[start:end].fill_(1)
