"""Who is measured: Headrace in its ways, and the peers, each ready to measure a figure. Knows how each is started.

A peer lives in a folder of its own in the cache (`install`), with its own Python; nothing of it is in ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.bench.peers import figures, install, llamacpp
from headrace.bench.peers.worker import Worker
from headrace.models import DEFAULT_MODEL, resolve

_WORKERS = Path(__file__).with_name("workers")
_SYSTEM_LIBRARIES = Path("/usr/lib")


class Contestant(Protocol):
    """Somebody who can be measured."""

    @property
    def title(self) -> str:
        """What it calls itself."""

    def warm_up(self) -> None:
        """Does once what is not to be measured."""

    def measure(self, figure: str, number: int) -> figures.Values:
        """Measures one figure once. Each `number` has prompts of its own. Raises RunFailed."""


@dataclass(frozen=True)
class Generator:
    """A contestant that generates items when it is asked."""

    worker: Worker

    @property
    def title(self) -> str:
        """What it calls itself."""
        return self.worker.version

    def warm_up(self) -> None:
        """Generates a little of everything."""
        figures.warm_up(self.worker.generate)

    def measure(self, figure: str, number: int) -> figures.Values:
        """The figure, by its own definition."""
        return figures.FIGURES[figure](self.worker.generate, number)


@dataclass(frozen=True)
class Attention:
    """A contestant that computes nothing but attention of decoded tokens."""

    worker: Worker

    @property
    def title(self) -> str:
        """What it calls itself."""
        return self.worker.version

    def warm_up(self) -> None:
        """It warms up each time."""

    def measure(self, figure: str, number: int) -> figures.Values:
        """Milliseconds of one layer; the numbers are always the same."""
        del number
        group, kv_heads = figures.ATTENTION[figure]
        shape = {"group": group, "kv_heads": kv_heads, **figures.ATTENDED}
        return {figure: self.worker.ask(shape)["ms"]}


def _worker(stack: ExitStack, name: str, command: list[str], environ: Mapping[str, str]) -> Worker:
    worker = Worker(name, command, {**os.environ, **environ})
    stack.callback(worker.close)
    return worker


def attention(stack: ExitStack, threads: int) -> Contestant:
    """Our attention alone, without an engine."""
    command = [sys.executable, "-m", "headrace.bench.peers.workers.ours_attention", str(threads)]
    return Attention(_worker(stack, "our attention", command, {}))


def engine(stack: ExitStack, variables: Mapping[str, str]) -> Contestant:
    """Our engine in a process of its own, without the others."""
    command = [sys.executable, "-m", "headrace.bench.peers.workers.ours", "engine"]
    return Generator(_worker(stack, "our engine", command, variables))


def clients(stack: ExitStack, target: str, *, text: bool) -> Contestant:
    """Clients of our gateway, in a process of their own; with `text` they send text, otherwise token ids."""
    command = [sys.executable, "-m", "headrace.bench.peers.workers.ours", "pipeline", target]
    command += [str(resolve(DEFAULT_MODEL))] if text else []
    return Generator(_worker(stack, "our clients", command, {}))


def _openvino(stack: ExitStack, threads: int) -> Contestant:
    python = install.python_of("openvino")
    command = [str(python), str(_WORKERS / "openvino_worker.py"), str(install.weights("F16")), str(threads)]
    return Generator(_worker(stack, "openvino", command, {}))


def _vllm(stack: ExitStack, threads: int) -> Contestant:
    python = install.python_of("vllm")
    command = [str(python), str(_WORKERS / "vllm_worker.py"), str(resolve(DEFAULT_MODEL))]
    return Generator(_worker(stack, "vllm", command, vllm_environ(python, threads)))


def _vllm_attention(stack: ExitStack, threads: int) -> Contestant:
    python = install.python_of("vllm")
    command = [str(python), str(_WORKERS / "vllm_attention.py"), str(threads)]
    return Attention(_worker(stack, "vllm's attention", command, vllm_environ(python, threads)))


def _smg(stack: ExitStack, threads: int) -> Contestant:
    python = install.smg_python()
    command = [str(python), str(_WORKERS / "smg_worker.py"), str(resolve(DEFAULT_MODEL))]
    return Generator(_worker(stack, "smg", command, vllm_environ(python, threads)))


def vllm_environ(python: Path, threads: int) -> dict[str, str]:
    """What makes vLLM fastest on `threads` cores: by default it leaves one of them idle.

    Its own allocator and OpenMP are loaded first where they are there, as its documentation asks for.
    """
    own = python.parents[1] / "lib"
    allocator = [*own.glob("libtcmalloc_minimal.so.4"), *_SYSTEM_LIBRARIES.glob("*/libtcmalloc_minimal.so.4")]
    preloaded = [*allocator[:1], *own.glob("libiomp5.so")]
    return {
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _llamacpp(weights: str) -> Callable[[ExitStack, int], Contestant]:
    def make(_stack: ExitStack, threads: int) -> Contestant:
        return llamacpp.LlamaCpp(install.llamacpp_programs(), install.weights(weights), weights, threads)

    return make


@dataclass(frozen=True)
class Peer:
    """A peer that `--vs` knows: how it is made, and what it can be measured by."""

    make: Callable[[ExitStack, int], Contestant]
    figures: tuple[str, ...]
    pipeline: bool = False  # it is one, and is compared with ours; both take text
    ours: Callable[[ExitStack, int], Contestant] | None = None  # what it is compared with, if not our engine


PEERS: dict[str, Peer] = {
    "openvino": Peer(_openvino, tuple(figures.FIGURES)),
    "vllm": Peer(_vllm, tuple(figures.FIGURES)),
    "vllm-attention": Peer(_vllm_attention, tuple(figures.ATTENTION), ours=attention),
    "smg": Peer(_smg, ("w1",), pipeline=True),
    "llamacpp": Peer(_llamacpp("BF16"), llamacpp.FIGURES),
    "llamacpp-q8": Peer(_llamacpp("Q8_0"), llamacpp.FIGURES),
}
