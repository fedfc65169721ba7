"""Has a GGUF file converted into a Hugging Face style directory, and checks the default model's.

The conversion (`headrace.models.gguf`) runs in a process of its own, so that torch, its memory and its global
settings end with it. Knows nothing of the store.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from headrace.models.errors import EXPLAINED, ImportFailed, ModelBroken, Progress
from headrace.models.store import read_json, validate

_NEEDS = ("torch", "numpy", "gguf", "safetensors", "tokenizers")
_GGUF_MAGIC = b"GGUF"
# The advice of its authors; the GGUF file does not say, and unshaped draws of so small a model are seldom sentences.
_DEFAULT_MODEL_SAMPLING = {"temperature": 0.2, "top_p": 0.9}


def convert_in_subprocess(gguf: Path, directory: Path, progress: Progress) -> None:
    """Convert `gguf` into the existing, empty `directory`; returns when every file is written.

    Raises:
        ImportFailed: not a GGUF file, a package is missing, or the file is damaged or holds what is not supported.
    """
    with gguf.open("rb") as stream:
        if stream.read(4) != _GGUF_MAGIC:
            raise ImportFailed(f"{gguf} is not a GGUF file (it does not start with the letters GGUF).")
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportFailed(
            f"Converting a GGUF file needs {', '.join(missing)}; run `pip install 'headrace[import]'` and try again."
        )
    progress(f"converting {gguf.name}", None)
    root = Path(__file__).resolve().parents[2]  # so that a checkout that is not installed finds itself
    search = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "headrace.models.gguf",
            str(gguf.absolute()),
            str(directory.absolute()),
        ],
        env={**os.environ, "PYTHONPATH": search},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        if done.returncode == EXPLAINED:
            raise ImportFailed(lines[-1].strip())
        raise ImportFailed(f"{gguf} could not be converted ({lines[-1].strip()[:300]}).")


def recommend_sampling(directory: Path) -> None:
    """Write how the default model is meant to be sampled into its generation_config.json."""
    path = directory / "generation_config.json"
    config = {**read_json(path), **_DEFAULT_MODEL_SAMPLING}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_default_model(directory: Path) -> None:
    """Check an import of the default model against what is known of it.

    Raises:
        ModelBroken: a fact differs; the message names it, what was expected and what was found.
    """
    config = validate(directory)
    tokenizer = read_json(directory / "tokenizer.json")
    texts = read_json(directory / "tokenizer_config.json")
    special = sorted(token["id"] for token in tokenizer["added_tokens"] if token["special"])
    writes_bos = "SpecialToken" in json.dumps(tokenizer.get("post_processor"))
    facts = [
        ("max_position_embeddings", config["max_position_embeddings"], 8192),
        ("vocab_size", config["vocab_size"], 49152),
        ("bos_token_id", config.get("bos_token_id"), 1),
        ("eos_token_id", config.get("eos_token_id"), 2),
        ("the size of the tokenizer's vocabulary", len(tokenizer["model"]["vocab"]), 49152),
        ("special token ids", special, list(range(17))),
        ("the decoder", (tokenizer.get("decoder") or {}).get("type"), "ByteLevel"),
        ("BOS added by the post-processor", writes_bos, False),
        ("bos_token", texts.get("bos_token"), "<|im_start|>"),
        ("eos_token", texts.get("eos_token"), "<|im_end|>"),
        ("a chat template", (directory / "chat_template.jinja").exists(), True),
        ("a single weights file", (directory / "model.safetensors").exists(), True),
    ]
    for name, found, expected in facts:
        if found != expected:
            raise ModelBroken(
                f"The import of the default model went wrong: {name} is {found!r}, expected {expected!r}; "
                "install the versions that pyproject.toml names and run `headrace model import` again."
            )
