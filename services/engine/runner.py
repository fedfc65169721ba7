"""Carries out a plan: arrays become tensors, tensors become tokens.

Owns the KV pool's memory; knows neither why a plan is what it is nor what becomes of its tokens.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable

import torch

from services.engine.computing import AnyDecoder
from services.engine.kernels.base import Kernels
from services.engine.kernels.kv_int8 import row_width
from services.engine.model.config import ModelConfig
from services.engine.plan import StepPlan, TokenLogprobs
from services.engine.ranks import LeadDecoder, LeadKernels
from services.engine.sampler import Choice, Sampler, chosen, explain
from services.engine.step import LogitRow, ScheduledStep, StepResult
from services.engine.transfer import to_device

_POPULATED_BYTES = 512 << 20  # of all layers' pools together
_MADV_POPULATE_WRITE = 23  # of Linux 5.14; Python has no name for it
_EXPLAINED_ROWS = 64  # rows of the vocabulary's width held at once while a prompt is explained


def allocate_kv(
    config: ModelConfig, block_count: int, block_size: int, dtype: torch.dtype, device: torch.device | None = None
) -> list[torch.Tensor]:
    """One [block_count + 1, block_size, 2, kv_heads, row] pool a layer.

    On a CPU the blocks that are used first are in memory from the start, the others' pages are touched on first use.
    """
    shape = (block_count + 1, block_size, 2, config.kv_head_count, row_width(config.head_dim, dtype))
    if device is None or device.type == "cpu":
        return [_paged(shape, dtype, _POPULATED_BYTES // config.layer_count) for _ in range(config.layer_count)]
    return [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.layer_count)]


def _paged(shape: tuple[int, ...], dtype: torch.dtype, populated_bytes: int) -> torch.Tensor:
    """Zeroed memory of its own, its first bytes there already, on huge pages where the system gives them.

    A page that a step is the first to touch costs it a fifth of the computing of a prompt.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(_MADV_POPULATE_WRITE, 0, min(size, populated_bytes))
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def tensors_of(plan: StepPlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, positions and slots of a plan, as a decoder takes them, on a device."""
    token_ids, positions, slots = (to_device(a, device) for a in (plan.token_ids, plan.positions, plan.slots))
    return token_ids, positions, slots.long()


class ModelRunner:
    """The decoder, its kernels, its KV pool and the sampler, as one call a step."""

    def __init__(
        self,
        decoder: AnyDecoder,
        kernels: Kernels | LeadKernels,
        sampler: Sampler,
        kv: list[torch.Tensor],
        dtype: torch.dtype,
        *,
        row_by_row: bool = False,
    ) -> None:
        """Put the parts together.

        Args:
            decoder: computes.
            kernels: what the decoder computes with.
            sampler: chooses tokens.
            kv: the pool, a tensor a layer.
            dtype: of activations.
            row_by_row: sample each row by itself, so that no sum spans several.
        """
        self.kv = kv
        self.dtype = dtype
        self._row_by_row = row_by_row
        self._decoder = decoder
        self._kernels = kernels
        self._sampler = sampler
        self._chosen = torch.empty(0, dtype=torch.int64)  # what the last step's rows were given, where it was computed

    def run(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a plan; its [T, hidden] states and the [L, vocabulary] logits of its logit rows."""
        device = self.kv[0].device
        batch = self._kernels.prepare(plan, self.dtype)
        token_ids, positions, slots = tensors_of(plan, device)
        if plan.fed_rows.size:
            ids = self._chosen.index_select(0, to_device(plan.fed_from, device)).clamp_(min=0)
            token_ids = token_ids.index_copy(0, to_device(plan.fed_rows, device).long(), ids.int())
        hidden = self._decoder.forward(token_ids, positions, slots, kv=self.kv, batch=batch)
        return hidden, self._decoder.logits(hidden, to_device(plan.logit_rows, device).long())

    def on_lost(self, function: Callable[[str], None]) -> None:
        """Have a function called when another rank has ended."""
        if isinstance(self._decoder, LeadDecoder):
            self._decoder.ranks.on_lost(function)

    def close(self) -> None:
        """End the other ranks, if there are any."""
        if isinstance(self._decoder, LeadDecoder):
            self._decoder.ranks.close()

    def launch(self, step: ScheduledStep) -> Callable[[], StepResult]:
        """Begin to compute a step; the function returned waits for what it gives, and is called once.

        A token is chosen for each logit row, and each prompt row is explained. On a CPU all but the last is done here.
        """
        hidden, logits = self.run(step.plan)
        choice = self._begin(logits, step.sampled)
        self._chosen = choice.ids
        if not step.explained:
            return lambda: StepResult([*choice.wait()])

        def wait() -> StepResult:
            failed: dict[int, str] = {}
            explained = self._explain(step, hidden, failed)
            return StepResult([*choice.wait()], explained, failed)

        return wait

    def _begin(self, logits: torch.Tensor, rows: list[LogitRow]) -> Choice:
        if not rows or not self._row_by_row:
            return self._sampler.begin(logits, rows)
        sampled = [self._sampler.sample(one, [row])[0] for one, row in zip(torch.split(logits, 1), rows, strict=True)]
        return chosen(sampled)

    def _explain(self, step: ScheduledStep, hidden: torch.Tensor, failed: dict[int, str]) -> list[list[TokenLogprobs]]:
        """Log probabilities of prompt tokens, a few rows of logits at a time, so that they never fill the memory."""
        found: list[list[TokenLogprobs]] = []
        taken = 0
        for request, count in step.explained:
            places = step.plan.prompt_rows[taken : taken + count]
            rows = to_device(places, hidden.device).long()
            following = request.prompt_ids[step.plan.positions[places] + 1].tolist()
            entries: list[TokenLogprobs] = []
            try:
                for start in range(0, count, _EXPLAINED_ROWS):
                    logits = self._decoder.logits(hidden, rows[start : start + _EXPLAINED_ROWS])
                    for row, token_id in zip(logits, following[start : start + _EXPLAINED_ROWS], strict=True):
                        entries.append(explain(row, token_id, request.sampling.prompt_logprobs or 0))
            except ValueError as error:
                failed[request.request_id] = f"explaining the prompt failed: {error}"
            found.append(entries)
            taken += count
        return found
