"""Every figure against every peer, one after the other: `python -m headrace.bench.peers` (or `make bench-peers`).

Each comparison leaves a file of its own in the folder of results; one that is there already is not measured again, so
what was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.cli import __main__ as command
from headrace.cli import bench_versus, output
from headrace.models import cache_dir

_INT8 = ("--quantization", "int8")

# What is compared, by the name of its result: arguments of `headrace bench offline`.
COMPARISONS: Mapping[str, Sequence[str]] = {
    "w1-openvino": ("--vs", "openvino", "--figure", "w1"),
    "w1-int8-openvino": ("--vs", "openvino", "--figure", "w1", "prompt", *_INT8),
    "w1-pipeline-engine": ("--pipeline", "--vs", "engine", "--figure", "w1"),
    "one-stream-llamacpp": ("--vs", "llamacpp", "--figure", "one-stream", "decode-32"),
    "one-stream-int8-llamacpp": ("--vs", "llamacpp-q8", "--figure", "one-stream", *_INT8),
    "prompt-openvino": ("--vs", "openvino", "--figure", "prompt", "one-stream"),
    "attention-vllm": ("--vs", "vllm-attention"),
    "w2-vllm": ("--vs", "vllm", "--figure", "w2"),
    "w1-pipeline-smg": ("--pipeline", "--vs", "smg"),
    "w1-vllm": ("--vs", "vllm", "--figure", "w1"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is asked for and not there; shows all of it; 1 where something failed."""
    parser = argparse.ArgumentParser(prog="headrace.bench.peers", description="Every figure against every peer.")
    parser.add_argument("--only", nargs="+", choices=tuple(COMPARISONS), default=tuple(COMPARISONS), metavar="NAME")
    parser.add_argument("--results", type=Path, default=cache_dir() / "peers" / "results", metavar="FOLDER")
    parser.add_argument("--again", action="store_true", help="measure also what is there")
    arguments = parser.parse_args(argv)
    arguments.results.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.only:
        target = arguments.results / f"{name}.json"
        if target.exists() and not arguments.again:
            output.stdout().print(bench_versus.table(json.loads(target.read_text())))
            continue
        unfinished = target.with_suffix(".part")
        if command.main(["bench", "offline", *COMPARISONS[name], "--json", str(unfinished)]) == output.OK:
            unfinished.replace(target)
        else:
            failed.append(name)
    if failed:
        output.stderr().print(f"not measured: {', '.join(failed)}", soft_wrap=True)
    return output.FAILED if failed else output.OK


if __name__ == "__main__":
    raise SystemExit(main())
