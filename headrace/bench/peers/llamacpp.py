"""llama.cpp by its own measuring programs, `llama-bench` and `llama-batched-bench`: no server is in its figures."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.bench.peers.figures import Values
from headrace.bench.results import RunFailed

_TIMEOUT_S = 300.0


class LlamaCpp:
    """A contestant; each measurement is a process of its own, which warms itself up."""

    def __init__(self, programs: Path, model: Path, weights: str, threads: int) -> None:
        self.title = f"llama.cpp {weights}"
        self._programs, self._model, self._threads = programs, model, str(threads)

    def warm_up(self) -> None:
        """Nothing lasts from one process to the next."""

    def measure(self, figure: str, number: int) -> Values:
        """Measures one figure once; the prompts are the programs' own."""
        del number
        return _FIGURES[figure](self)

    def one_stream(self) -> Values:
        """Decoding 128 tokens after 64."""
        return {"one-stream": 1e3 / self._bench("-p", "0", "-n", "128", "-d", "64")}

    def prompt(self) -> Values:
        """1,024 tokens of prompt."""
        return {"prompt": 1024e3 / self._bench("-p", "1024", "-n", "0")}

    def decode_32(self) -> Values:
        """32 sequences of 64 tokens after 128."""
        shape = ("-c", "8192", "-b", "2048", "-ub", "512", "-npp", "128", "-ntg", "64", "-npl", "32")
        said = self._run("llama-batched-bench", *shape, "-tb", self._threads, "--output-format", "jsonl")
        lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        if len(lines) != 1:
            raise RunFailed(f"llama-batched-bench wrote {len(lines)} results; expected 1")
        return {"decode-32": float(lines[0]["speed_tg"])}

    def _bench(self, *shape: str) -> float:
        """Tokens a second."""
        rows: list[dict[str, Any]] = json.loads(self._run("llama-bench", *shape, "-r", "1", "-o", "json"))
        return float(rows[0]["avg_ts"])

    def _run(self, program: str, *arguments: str) -> str:
        command = [str(self._programs / program), "-m", str(self._model), "-t", self._threads, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunFailed(f"{program}: {error}") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise RunFailed(f"{program} ended with {done.returncode}; it wrote: {last}")
        return done.stdout


_FIGURES: dict[str, Callable[[LlamaCpp], Values]] = {
    "one-stream": LlamaCpp.one_stream,
    "prompt": LlamaCpp.prompt,
    "decode-32": LlamaCpp.decode_32,
}
FIGURES = tuple(_FIGURES)
