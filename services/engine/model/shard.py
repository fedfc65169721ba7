"""One rank's part of a model under tensor parallelism (Shoeybi et al., Megatron-LM, 2019). Knows names and shapes.

Query heads, key/value heads, the feed-forward's width and the head's vocabulary are cut into as many parts as there are
ranks; the residual stream, norms and the embedding are whole on each. So a layer exchanges two sums, and the head one
gathering. With one rank nothing is cut and nothing exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.nn import functional

from services.engine.kernels.base import Linear
from services.engine.model.config import ModelConfig

_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUTS = ("o_proj.weight", "down_proj.weight")
_ADDED_ONCE = "o_proj.bias"  # after the sum it is added once: the first rank has it, the others zeros
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of how many."""

    rank: int = 0
    count: int = 1

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError where the model cannot be cut so."""
        for name, size in (
            ("key/value heads", model.kv_head_count),
            ("feed-forward columns", model.intermediate_size),
        ):
            if size % self.count:
                raise ValueError(f"tensor_parallel is {self.count}; it must divide the model's {size} {name}")

    def of(self, model: ModelConfig) -> ModelConfig:
        """The model as this rank computes it: its own heads and feed-forward columns."""
        return replace(
            model,
            head_count=model.head_count // self.count,
            kv_head_count=model.kv_head_count // self.count,
            intermediate_size=model.intermediate_size // self.count,
        )

    def place(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Where in a tensor of the whole model this rank's part is, as indices of its dimensions."""
        if self.count == 1:
            return ()
        if name.endswith(_BY_INPUTS):
            return slice(None), self._part(shape[1])
        if name == HEAD or any(kind in name for kind in _BY_OUTPUTS):
            return (self._part(shape[0]),)
        return ()

    def is_elsewhere(self, name: str) -> bool:
        """True for what another rank adds."""
        return self.rank > 0 and name.endswith(_ADDED_ONCE)

    def summed(self, linear: Linear) -> Linear:
        """A product over this rank's inputs, completed by those of the others."""
        if self.count == 1:
            return linear

        def product(x: torch.Tensor) -> torch.Tensor:
            result = linear(x)
            dist.all_reduce(result)
            return result

        return product

    def gathered(self, linear: Linear, outputs: int) -> Linear:
        """A product that gives this rank's part of so many outputs, completed by the parts of the others."""
        if self.count == 1:
            return linear
        width = -(-outputs // self.count)  # the last part may be narrower

        def product(x: torch.Tensor) -> torch.Tensor:
            part = linear(x)
            padded = functional.pad(part, (0, width - part.shape[1])).contiguous()
            parts = [torch.empty_like(padded) for _ in range(self.count)]
            dist.all_gather(parts, padded)
            return torch.cat(parts, dim=1)[:, :outputs]

        return product

    def _part(self, size: int) -> slice:
        width = -(-size // self.count)
        return slice(min(self.rank * width, size), min((self.rank + 1) * width, size))
