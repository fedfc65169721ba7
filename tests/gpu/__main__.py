"""Checks and measures the engine on a GPU: `python3 -m tests.gpu` (or `make gpu-check`), within six minutes.

First parity, then figures: of a Llama-3-8B-shaped and a Qwen3-0.6B-shaped model with random weights, made here. One
table, and JSON with --json. A part for which no time is left is skipped, and the table says so. With --dry-run
everything runs on tiny shapes, on a CPU too, and no figure is judged.

Exit codes: 0 all well, or no GPU, which it says; 1 parity or a part failed, or a figure misses its goal.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from services.engine.engine import Engine, EngineConfig
from services.engine.model.config import load_config
from tests.gpu import measure, parity, shapes

OK, FAILED = 0, 1


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    streams: tuple[int, ...] = (1, 16, 64, 256)
    compared: int = 64
    """Streams of the comparison with transformers, and of the second share of bandwidth."""
    prompt: int = 512
    output: int = 64
    prefill: int = 4096
    copied_bytes: int = 1 << 30
    matmul: int = 8192
    engine: dict[str, Any] = field(
        default_factory=lambda: {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 8192}
    )


DRY = Scale(
    streams=(1, 2),
    compared=2,
    prompt=5,
    output=3,
    prefill=12,
    copied_bytes=1 << 16,
    matmul=64,
    engine={"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "kv_blocks": 16},
)


@dataclass
class Row:
    """A figure, and what it should be at least; or what there is to say instead."""

    name: str
    value: float | None
    unit: str
    goal: float | None = None
    note: str = ""

    @property
    def missed(self) -> bool:
        """True for a figure below its goal."""
        return self.goal is not None and self.value is not None and self.value < self.goal

    def __str__(self) -> str:
        value = "" if self.value is None else f"{self.value:.3f}" if self.value < 10 else f"{self.value:.1f}"
        return f"{self.name:<48} {value:>12} {self.unit:<8} {self.note}".rstrip()


class Check:
    """Rows as they come, within a time."""

    def __init__(self, scale: Scale, device: torch.device, folder: Path, seconds: float) -> None:
        self.scale, self.device, self._folder = scale, device, folder
        self._until = time.monotonic() + seconds
        self.rows: list[Row] = []
        self.wrong: list[str] = []

    def part(self, name: str, work: Callable[[], None]) -> None:
        """Do a part, or skip it where its time is over."""
        if time.monotonic() > self._until:
            self.rows.append(Row(name, None, "", note="skipped: no time left"))
            return
        begun, known = time.monotonic(), len(self.rows)
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the other parts are worth their time
            self._fail(name, f"{type(error).__name__}: {str(error)[:300]}")
        self._empty()
        taken = time.monotonic() - begun
        for line in (*map(str, self.rows[known:]), f"{name}: {taken:.1f} s"):  # a run that is cut short has told this
            sys.stderr.write(line + "\n")

    def parity(self, name: str, error: str | None) -> None:
        """Note whether something is as it must be."""
        if error is not None:
            self._fail(f"parity: {name}", error)
        else:
            self.rows.append(Row(f"parity: {name}", None, "", note="equal"))

    def run(self, large: dict[str, Any], small: dict[str, Any]) -> None:
        """Everything, what matters most first."""
        self.part("parity", lambda: self.parity("ids in float32", parity.check_ids(self._folder, self.device)))
        self.part("int8", lambda: self.parity("int8 keys and values", parity.check_bytes(self._folder, self.device)))
        self.part("device", self._device)
        models = {}
        for name, config in (("8B", large), ("0.6B", small)):
            self.part(f"{name}: weights", lambda n=name, c=config: models.update({n: self._write(n, c)}))  # type: ignore[misc]
        if "8B" in models:
            self.part("8B", lambda: self._engine("8B", models["8B"]))
        if "0.6B" in models:
            self.part("0.6B", lambda: self._engine("0.6B", models["0.6B"]))
            self.part("0.6B: without graphs", lambda: self._without_graphs(models["0.6B"]))
            self.part("0.6B: transformers", lambda: self._beside_transformers("0.6B", models["0.6B"]))
        if "8B" in models:
            self.part("8B: transformers", lambda: self._beside_transformers("8B", models["8B"]))
        if "0.6B" in models:
            self.part("0.6B: not planned ahead", lambda: self._not_ahead(models["0.6B"]))

    def value(self, name: str) -> float | None:
        """A figure that was measured before."""
        return next((row.value for row in self.rows if row.name == name), None)

    def _write(self, name: str, config: dict[str, Any]) -> Path:
        return shapes.write_random_model(self._folder / name, config, self.device)

    def _device(self) -> None:
        copied = measure.copy_bandwidth(self.device, self.scale.copied_bytes)
        self.rows.append(Row("copy", copied / 1e9, "GB/s"))
        self.rows.append(Row("matmul, bfloat16", measure.matmul_rate(self.device, self.scale.matmul) / 1e12, "TFLOP/s"))

    def _engine(self, name: str, path: Path) -> None:
        work, scale = shapes.Work(load_config(path)), self.scale
        with self._loaded(path) as engine:
            taken = measure.prefill_s(engine, scale.prefill)
            rate = work.prefill_operations(scale.prefill) / taken / 1e12
            share = rate / (self.value("matmul, bfloat16") or rate)
            goal = 0.5 if name == "8B" else None
            self.rows.append(Row(f"{name}: prefill of {scale.prefill}, of the matmul", share, "", goal))
            for count in scale.streams:
                seen = measure.streams(engine, count, scale.prompt, scale.output)
                self.rows.append(Row(f"{name}: {count} streams, first token", seen.first_token_s * 1e3, "ms"))
                self.rows.append(Row(f"{name}: {count} streams, a token", seen.token_s * 1e3, "ms"))
                self.rows.append(Row(f"{name}: {count} streams, output", seen.tokens_per_s, "tok/s"))
                if count in (1, scale.compared):
                    read = work.decode_bytes(count, seen.context) / seen.token_s / 1e9
                    goal = {1: 0.7, scale.compared: 0.55}[count] if name == "8B" else None
                    share = read / (self.value("copy") or read)
                    self.rows.append(Row(f"{name}: {count} streams, decode of the copy", share, "", goal))
            if name == "0.6B":
                wrong = measure.unsteady(engine, scale.compared, scale.prompt, scale.output)
                self.parity(f"{name}: the host waits for ids alone, no memory grows", wrong)

    def _not_ahead(self, path: Path) -> None:
        scale = self.scale
        with self._loaded(path, async_scheduling="off") as engine:
            plain = measure.streams(engine, scale.compared, scale.prompt, scale.output).token_s * 1e3
        self.rows.append(Row(f"0.6B: {scale.compared} streams, a token, not planned ahead", plain, "ms"))

    def _without_graphs(self, path: Path) -> None:
        with self._loaded(path, cuda_graphs=False) as engine:
            eager = measure.streams(engine, 1, self.scale.prompt, self.scale.output).token_s * 1e3
        graphed = self.value("0.6B: 1 streams, a token")
        self.rows.append(Row("0.6B: 1 streams, a token, without graphs", eager, "ms"))
        if graphed is not None:
            self.rows.append(Row("0.6B: 1 streams, graphs are faster by", eager / graphed, "x", 2.0))

    def _beside_transformers(self, name: str, path: Path) -> None:
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            self.rows.append(Row(f"{name}: transformers", None, "", note=f"skipped: {error}"))
            return
        scale = self.scale
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(self.device).eval()
        rate = measure.transformers_tokens_per_s(theirs, scale.compared, scale.prompt, scale.output)
        self.rows.append(Row(f"{name}: {scale.compared} streams, transformers", rate, "tok/s"))
        ours = self.value(f"{name}: {scale.compared} streams, output")
        if ours is not None:
            self.rows.append(Row(f"{name}: {scale.compared} streams, of transformers", ours / rate, "x", 5.0))
        if name == "0.6B":  # both fit into any GPU's memory at once
            with self._loaded(path, kv_blocks=64, cuda_graphs=False) as engine:
                prompt = list(range(min(60, scale.prefill)))
                self.parity(f"{name}: logits beside transformers", parity.check_logits(engine, theirs, prompt))

    @contextmanager
    def _loaded(self, path: Path, **changes: Any) -> Iterator[Engine]:
        engine = Engine.load(
            EngineConfig(
                path,
                dtype="bfloat16",
                kernels="triton" if self.device.type == "cuda" else "torch",  # interpreted kernels take seconds
                profile="throughput",
                prefix_cache=False,
                **{**self.scale.engine, **changes},
            )
        )
        engine.warm_up()
        try:
            yield engine
        finally:
            engine.close()

    def _fail(self, name: str, error: str) -> None:
        self.rows.append(Row(name, None, "", note=f"FAILED: {error}"))
        self.wrong.append(f"{name}: {error}")

    def _empty(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def report(check: Check, *, judged: bool) -> tuple[str, dict[str, Any]]:
    """The table, and the same as JSON."""
    card = torch.cuda.get_device_name(check.device) if check.device.type == "cuda" else "CPU"
    head = {"date": datetime.now(UTC).date().isoformat(), "device": card, "torch": torch.__version__, "judged": judged}
    lines = [f"{card}, torch {torch.__version__}, {head['date']}" + ("" if judged else ": DRY RUN, no figures")]
    for row in check.rows:
        judgement = f" goal {row.goal}: {'MISSED' if row.missed else 'met'}" if judged and row.goal is not None else ""
        lines.append(f"{row}{judgement}")
    return "\n".join(lines), {**head, "rows": [asdict(row) for row in check.rows], "wrong": check.wrong}


def main(arguments: list[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="tests.gpu", description="Checks and measures the engine on a GPU.")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on a CPU too; nothing is judged")
    parser.add_argument("--json", type=Path, help="file for the figures, beside the table")
    parser.add_argument("--seconds", type=float, default=330.0, help="no part is begun after so many")
    options = parser.parse_args(arguments)
    there = torch.cuda.is_available()
    if not there and not options.dry_run:
        sys.stdout.write("gpu-check: torch finds no CUDA device here; skipped. --dry-run tries the code paths.\n")
        return OK
    if not there:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    device = torch.device("cuda", 0) if there else torch.device("cpu")
    large, small = shapes.LLAMA_3_8B, shapes.QWEN3_0_6B
    if options.dry_run:
        large, small = shapes.shrunk(large), shapes.shrunk(small)
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-") as folder:
        check = Check(DRY if options.dry_run else Scale(), device, Path(folder), options.seconds)
        check.run(large, small)
    table, figures = report(check, judged=not options.dry_run)
    sys.stdout.write(table + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    missed = not options.dry_run and any(row.missed for row in check.rows)
    return FAILED if check.wrong or missed else OK


if __name__ == "__main__":
    raise SystemExit(main())
