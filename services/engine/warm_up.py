"""The generation that an engine does before it serves, on the largest step that it will ever have.

Knows the engine's public face. It shows that the engine works, makes the first real request no slower than the
second, and measures what a step needs beside weights and KV.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.engine.limits import EngineLimits
from services.engine.request import Request, SamplingParams

_SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9, seed=0))


def largest_step(limits: EngineLimits, max_num_seqs: int, budget: int, block_size: int) -> list[Request]:
    """Requests, with negative ids, that fill one step with as many tokens and sequences as there may be.

    Every other one is drawn at random; no two share a prefix. Each generates two tokens where there is room.
    """
    most = min(limits.context_length - 1, limits.kv_token_capacity)
    count = min(max_num_seqs, limits.kv_token_capacity // block_size)
    length = max(1, min(budget // count, most))
    return [
        Request(
            -1 - index,
            [(index + place) % limits.vocab_size for place in range(length)],
            max_tokens=min(2, most + 1 - length),
            sampling=_SAMPLINGS[index % 2],
            ignore_eos=True,
        )
        for index in range(count)
    ]


class ActivationMeter(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's hook has no types
    """Counts the bytes of tensors that are made, and live at the same time, while it is entered.

    What an operator allocates and frees inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live_bytes = 0
        self._users: dict[int, int] = {}  # tensors on each storage that was made here

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and to be told so torch's compiler would be loaded, which takes 150 MB."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator; note what it was given and what it made."""
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors(args)}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result if isinstance(result, tuple | list) else (result,)):
            pointer = tensor.untyped_storage().data_ptr()
            if pointer in self._users or pointer not in given:  # else a view of what was there before
                self._note(tensor, pointer)
        return result

    def _note(self, tensor: torch.Tensor, pointer: int) -> None:
        size = tensor.untyped_storage().nbytes()
        if pointer not in self._users:
            self._live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        self._users[pointer] = self._users.get(pointer, 0) + 1
        weakref.finalize(tensor, self._drop, pointer, size)

    def _drop(self, pointer: int, size: int) -> None:
        self._users[pointer] -= 1
        if self._users[pointer] == 0:
            del self._users[pointer]
            self._live_bytes -= size


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """Plain tensors among the values, and in lists among them."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                found.append(value)
        elif isinstance(value, tuple | list):
            found.extend(_tensors(value))
    return found
