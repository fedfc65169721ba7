"""A growable array of token ids or block numbers. Knows nothing of what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


class IntBuffer:
    """A growable int32 array of ``size`` values; ``view`` is valid until the next ``append`` or ``extend``."""

    __slots__ = ("_data", "size")

    def __init__(self, values: Iterable[int] | NDArray[np.int32] = ()) -> None:
        initial = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.int32)
        self.size = int(initial.size)
        self._data = np.empty(max(16, self.size + 32), dtype=np.int32)
        self._data[: self.size] = initial

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not -self.size <= index < self.size:
            raise IndexError(index)
        return int(self._data[index + self.size if index < 0 else index])

    @property
    def view(self) -> NDArray[np.int32]:
        """The values, [size] int32, without a copy."""
        return self._data[: self.size]

    def append(self, value: int) -> None:
        """Add one value at the end."""
        self._reserve(1)
        self._data[self.size] = value
        self.size += 1

    def extend(self, values: NDArray[np.int32]) -> None:
        """Add values at the end."""
        self._reserve(int(values.size))
        self._data[self.size : self.size + values.size] = values
        self.size += int(values.size)

    def clear(self) -> None:
        """Forget every value."""
        self.size = 0

    def _reserve(self, extra: int) -> None:
        if self.size + extra > self._data.size:
            grown = np.empty(max(2 * self._data.size, self.size + extra), dtype=np.int32)
            grown[: self.size] = self._data[: self.size]
            self._data = grown
