"""Where models live, and what is in a model's directory.

The store is `models/` below the cache: one Hugging Face style directory (or a link to one) a model. Reads
headers and JSON only: it knows neither tensors nor tokenizers, and never touches the network.
"""

import json
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.models.errors import ImportFailed, ModelBroken, ModelError, ModelNotFound
from headrace.models.families import FAMILIES

DEFAULT_MODEL = "smollm2-135m-instruct"
RECORD = "headrace.json"  # in an imported directory: {"source": where it came from}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One stored model, as `headrace model list` shows it."""

    name: str
    directory: Path
    size_bytes: int  # of every file in the directory
    architecture: str  # "LlamaForCausalLM", or "" where config.json names none
    dtype: str  # "bfloat16", or "" where config.json names none
    context: int  # tokens: max_position_embeddings
    problem: str = ""  # why it cannot be served; "" when nothing is wrong


def cache_dir() -> Path:
    """Return `$HEADRACE_CACHE`, else `$XDG_CACHE_HOME/headrace`, else `~/.cache/headrace`."""
    own = os.environ.get("HEADRACE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared).expanduser().absolute() if shared else Path.home() / ".cache"
    return base / "headrace"


def models_dir() -> Path:
    """Return the store, which need not exist yet."""
    return cache_dir() / "models"


def make_directory(directory: Path) -> None:
    """Create a directory of the cache, with its parents; raises ImportFailed where that is not possible."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ImportFailed(
            f"{directory} cannot be created ({error.strerror}); set HEADRACE_CACHE to a directory that can be written."
        ) from error


def check_name(name: str) -> str:
    """Return `name` if it can be a directory of the store, else raise ModelError."""
    if not _NAME.fullmatch(name):
        raise ModelError(
            f"{name!r} cannot name a stored model: use letters, digits, '.', '_' and '-', starting with "
            "a letter or digit."
        )
    return name


def resolve(model: str | Path = DEFAULT_MODEL) -> Path:
    """Return the directory of a model given as a directory, as a stored name, or as the hub id it came from.

    Raises:
        ModelNotFound: neither a directory with a config.json nor a name in the store.
        ModelBroken: the directory is there and its config.json is not usable.
    """
    as_path = Path(model).expanduser()
    if as_path.is_dir():
        if not (as_path / "config.json").exists():
            raise ModelNotFound(
                f"{as_path} is a directory without a config.json; name a Hugging Face style model "
                "directory, or a stored model (`headrace model list`)."
            )
        found = as_path
    elif _NAME.fullmatch(str(model)) and (models_dir() / str(model)).is_symlink():
        found = models_dir() / str(model)
        if not found.is_dir():
            raise ModelBroken(
                f"The stored model {str(model)!r} is a link to {found.readlink()}, which is gone; "
                f"remove {found} or bring the directory back."
            )
    elif _NAME.fullmatch(str(model)) and (models_dir() / str(model)).is_dir():
        found = models_dir() / str(model)
    elif (imported := _imported_from_hub(str(model))) is not None:
        found = imported
    else:
        raise ModelNotFound(_not_found(str(model)))
    read_json(found / "config.json")
    return found.resolve()


def list_models() -> list[ModelInfo]:
    """Return every stored model, by name; broken ones are listed with their `problem`."""
    if not models_dir().is_dir():
        return []
    names = [entry.name for entry in models_dir().iterdir() if _NAME.fullmatch(entry.name)]
    return [_describe(name) for name in sorted(names)]


def validate(directory: Path) -> dict[str, Any]:
    """Check that a directory can be served, reading headers only; return its config.json.

    Looks at: config.json (an architecture we know, a vocabulary, a context), tokenizer.json, and the
    weights' headers against the sizes of their files, which finds a cut-off download.

    Raises:
        ModelBroken: naming the file and what was expected of it.
    """
    config = read_json(directory / "config.json")
    named = config.get("architectures") or []
    if not isinstance(named, list) or not any(name in FAMILIES for name in named):
        raise ModelBroken(
            f"{directory / 'config.json'} names the architectures {named}; expected one of {', '.join(FAMILIES)}."
        )
    for key in ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers"):
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelBroken(f"{directory / 'config.json'} has {key} = {value!r}; expected a positive integer.")
    read_json(directory / "tokenizer.json")
    for file in weight_files(directory):
        read_safetensors_header(file)
    return config


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model: the single one, or those its index names.

    Raises:
        ModelBroken: there are none, or the index names a file that is not there.
    """
    single, index = directory / _WEIGHTS, directory / _WEIGHTS_INDEX
    if single.exists():
        return [single]
    if not index.exists():
        raise ModelBroken(f"{directory} holds neither {_WEIGHTS} nor {_WEIGHTS_INDEX}; expected one of them.")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelBroken(f"{index} has no weight_map; expected one entry a tensor.")
    files = [directory / name for name in sorted({str(file) for file in weight_map.values()})]
    for file in files:
        if not file.exists():
            raise ModelBroken(f"{file} is missing; {index.name} says that it holds weights.")
    return files


def read_safetensors_header(file: Path) -> dict[str, Any]:
    """Return a safetensors file's header and check the file's length against it.

    The format (https://github.com/huggingface/safetensors#format): 8 bytes of little-endian header length,
    the header as JSON, the tensors' bytes.

    Raises:
        ModelBroken: not such a file, or shorter or longer than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, max(size - 8, 0)):
            raise ModelBroken(f"{file} ({size} bytes) does not start with a safetensors header.")
        try:
            header = json.loads(stream.read(length))
            end = max(
                (entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"),
                default=0,
            )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ModelBroken(f"{file} has an unreadable safetensors header ({error}).") from error
    expected = 8 + length + int(end)
    if size != expected:
        raise ModelBroken(f"{file} is {size} bytes long and its header promises {expected}; fetch it again.")
    return dict(header)


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON file's object.

    Raises:
        ModelBroken: the file is missing, unreadable, not JSON, or not an object.
    """
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelBroken(f"{file} is missing; expected a Hugging Face style model directory.") from None
    except (OSError, ValueError) as error:
        raise ModelBroken(f"{file} cannot be read as JSON ({error}).") from error
    if not isinstance(loaded, dict):
        raise ModelBroken(f"{file} holds a JSON {type(loaded).__name__}; expected an object.")
    return loaded


def _imported_from_hub(hub_id: str) -> Path | None:
    """Return the stored model that was imported from `hub_id` under its usual name."""
    owner, slash, name = hub_id.partition("/")
    if not (owner and slash and _NAME.fullmatch(name)):
        return None
    directory = models_dir() / name.lower()
    try:
        return directory if read_json(directory / RECORD).get("source") == hub_id else None
    except ModelBroken:
        return None


def _describe(name: str) -> ModelInfo:
    directory = models_dir() / name
    try:
        config = validate(resolve(name))
        problem = ""
    except ModelError as error:
        config, problem = {}, str(error)
    architectures = config.get("architectures") or [""]
    return ModelInfo(
        name=name,
        directory=directory,
        size_bytes=sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()),
        architecture=str(architectures[0]),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        context=int(config.get("max_position_embeddings") or 0),
        problem=problem,
    )


def _not_found(model: str) -> str:
    if model == DEFAULT_MODEL:
        return f"The default model {model!r} is not in {models_dir()}; run `headrace model import` to fetch it."
    stored = ", ".join(info.name for info in list_models()) or "none"
    return (
        f"No model {model!r}: it is neither a directory nor a name in {models_dir()} (stored: {stored}); "
        f"run `headrace model import {model}` or give a directory."
    )
