"""A GGUF file's header: its metadata and where each tensor lies, checked against the file's length.

Knows the container, not what its keys mean. The `gguf` package's own reader is not used: it takes a cut-off file
for empty arrays, and a damaged length makes it loop.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from headrace.models.errors import ImportFailed

READABLE = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEEPEST_ARRAY = 4
_MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and how it is packed."""

    name: str
    shape: tuple[int, ...]  # outermost first, as in torch; GGUF itself writes the innermost first
    kind: GGMLQuantizationType
    start: int  # bytes from the beginning of the file
    size_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one innermost row; blocks never cross rows."""
        block, packed = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * packed


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file whose header was read whole and fits the file's length."""

    path: Path
    metadata: dict[str, Any]  # numbers, strings, or lists of them
    tensors: dict[str, TensorInfo]

    def fail(self, what: str) -> ImportFailed:
        """An error about this file: `what` goes on after its name."""
        return ImportFailed(f"{self.path} {what}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer of the metadata; raises ImportFailed."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{self._found(key)}; expected a positive integer.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number of the metadata, rounded to what 32 bits hold; raises ImportFailed."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.fail(f"{self._found(key)}; expected a positive number.")
        return float(f"{value:.7g}")

    def text(self, key: str) -> str:
        """A string of the metadata; raises ImportFailed."""
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise self.fail(f"{self._found(key)}; expected a text.")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """A list of the metadata whose items are all of `kind`; raises ImportFailed."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, kind) for item in value):
            raise self.fail(f"{self._found(key)}; expected a list of {kind.__name__} values.")
        return value

    def _found(self, key: str) -> str:
        return f"has {key} = {str(self.metadata[key])[:60]}" if key in self.metadata else f"lacks {key}"


def read_header(path: Path) -> GgufFile:
    """Read metadata and tensor descriptions.

    Raises:
        ImportFailed: not GGUF, of a version or byte order that is not read, cut off, damaged, in several
            parts, or packed in a way that is not supported; one sentence that names the file.
    """
    if path.stat().st_size == 0:
        raise ImportFailed(f"{path} is empty; expected a GGUF file.")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Header(path, data).read()


class _Header:
    """A cursor over the file; `_doing` says what is being read, for complaints."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0
        self._doing = "its first bytes"

    def read(self) -> GgufFile:
        if self._take(4) != b"GGUF":
            raise ImportFailed(f"{self._path} is not a GGUF file (it does not start with the letters GGUF).")
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise ImportFailed(f"{self._path} is a big-endian GGUF file; expected little-endian.")
        if version not in (2, 3):
            raise ImportFailed(f"{self._path} is of GGUF version {version}; expected 2 or 3.")
        tensor_count, key_count = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for place in range(key_count):
            self._doing = f"metadata entry {place + 1} of {key_count}"
            key = self._string()
            self._doing = f"metadata entry {key[:80]!r}"
            metadata[key] = self._value(self._number("I"))
        parts = metadata.get("split.count")
        if isinstance(parts, int) and parts > 1:
            raise ImportFailed(
                f"{self._path} is one of {parts} parts; expected a whole model, so join the parts with "
                "`llama-gguf-split --merge` first."
            )
        described = [self._describe(place, tensor_count) for place in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ImportFailed(f"{self._path} has general.alignment = {alignment!r}; expected a positive integer.")
        start = -(-self._at // alignment) * alignment
        return GgufFile(self._path, metadata, {one[0]: self._place(start, *one) for one in described})

    def _describe(self, place: int, count: int) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, kind and offset of one tensor."""
        self._doing = f"the description of tensor {place + 1} of {count}"
        name = self._string()
        self._doing = f"the description of tensor {name[:80]!r}"
        if not name.isprintable():
            raise self._damaged("control characters in it")
        dimensions = self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._damaged(f"{dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        return name, shape[::-1], self._number("I"), self._number("Q")

    def _place(self, start: int, name: str, shape: tuple[int, ...], code: int, offset: int) -> TensorInfo:
        """Check one description against the file."""
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            kind = None
        if kind is None or kind.name not in READABLE:
            called = kind.name if kind else f"number {code}"
            raise ImportFailed(
                f"{self._path} holds tensor {name} in quantisation {called}; expected one of {', '.join(READABLE)}."
            )
        block, packed = GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise ImportFailed(
                f"{self._path} is damaged: tensor {name} has rows of {shape[-1]} values; expected a multiple of "
                f"{kind.name}'s block of {block}."
            )
        size = math.prod(shape) // block * packed
        if start + offset + size > self._size:
            raise ImportFailed(
                f"{self._path} is cut off: it is {self._size} bytes long and tensor {name} ends at byte "
                f"{start + offset + size}; fetch it again."
            )
        return TensorInfo(name, shape, kind, start + offset, size)

    def _value(self, code: int, depth: int = 0) -> Any:
        if code == _STRING:
            return self._string()
        if code in _SCALARS:
            return self._number(_SCALARS[code])
        if code != _ARRAY or depth == _DEEPEST_ARRAY:
            raise self._damaged(f"value type {code}")
        item_code, count = self._number("I"), self._number("Q")
        if item_code in _SCALARS:
            letter = _SCALARS[item_code]
            size = struct.calcsize(f"<{letter}")
            return list(struct.unpack(f"<{count}{letter}", self._take(count * size)))
        return [self._value(item_code, depth + 1) for _ in range(count)]

    def _string(self) -> str:
        raw = self._take(self._number("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged("text that is not UTF-8") from None

    def _number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise ImportFailed(
                f"{self._path} ({self._size} bytes) is cut off or damaged: it ends in {self._doing}; fetch it again."
            )
        taken, self._at = self._data[self._at : end], end
        return taken

    def _damaged(self, what: str) -> ImportFailed:
        return ImportFailed(f"{self._path} is damaged: {self._doing} has {what}; fetch it again.")
