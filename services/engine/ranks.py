"""The first rank's side of tensor parallelism: it starts the others, tells them each step, and notices a death.

Knows processes and what is told; nothing of requests. Each other rank is a process (``rank``) with a pipe: what is to
be computed goes through the pipe, tensors by torch.distributed. A rank that ends, ends the engine: ``RankLost``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from services.engine.config import EngineConfig
from services.engine.faults import EngineFault
from services.engine.kernels.base import AttentionBatch, Kernels
from services.engine.model.decoder import Decoder
from services.engine.plan import StepPlan

ROOT = Path(__file__).parents[2]  # the folder that holds the package `services`
READY = "ready"  # what a rank says before it joins the others, and again with its weights read
_START_S = 600  # to read the weights
_NOTICE_S = 5.0  # within which a death is known after a collective has failed


class RankLost(EngineFault):
    """Another rank has ended: nothing can be computed any more."""


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank is made from: told first."""

    config: EngineConfig
    length: int
    """The longest sequence that will be computed."""
    rank: int
    store: Path
    """The file by which the ranks find each other."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute a plan, and the logits of its logit rows; the pool has so many blocks, the null block included."""

    plan: StepPlan
    block_count: int


@dataclass(frozen=True, slots=True)
class Logits:
    """Compute logits of further rows, int64, of the last ``Forward``."""

    rows: NDArray[np.int64]


def join(rank: int, count: int, store: Path, device: torch.device) -> None:
    """Become a rank of the default group; waits for the others.

    Raises:
        RuntimeError: they did not come.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=store.as_uri(),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=_START_S),
    )


def share_fed(plan: StepPlan, token_ids: torch.Tensor) -> None:
    """Let every rank's [T] ids be the first rank's, where some are not in the plan: it alone has chosen them."""
    if plan.fed_rows.size:
        dist.broadcast(token_ids, src=0)


class Ranks:
    """The processes of ranks 1 and up."""

    def __init__(self, config: EngineConfig, length: int) -> None:
        """Start a process for each, which reads its part of the weights; ``length`` is the longest sequence."""
        folder = Path(tempfile.mkdtemp(prefix="headrace-ranks-"))
        self.store = folder / "store"
        self._closing = threading.Event()
        self._lost = threading.Event()
        self._text = ""
        self._on_lost: Callable[[str], None] = lambda _text: None
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._finalizer = weakref.finalize(self, _end, self._processes, self._pipes, folder)
        for rank in range(1, config.tensor_parallel):
            self._start(RankSetup(config, length, rank, self.store))
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=_watch, args=(weakref.ref(self), rank, process), daemon=True).start()

    def tell(self, message: object) -> None:
        """Have every rank do something.

        Raises:
            RankLost: one has ended.
        """
        try:
            for pipe in self._pipes:
                pipe.send(message)
        except OSError as error:
            raise self.lost() from error
        if self._lost.is_set():
            raise self.lost()

    def wait(self) -> None:
        """Wait until every rank has come to its next ``READY``.

        Raises:
            RankLost: one has ended instead.
        """
        try:
            for pipe in self._pipes:
                pipe.recv()
        except (EOFError, OSError) as error:
            raise self.lost() from error

    def lost(self, cause: BaseException | None = None) -> RankLost:
        """The error to raise after something failed that needs all ranks; waits a little for the death to be known."""
        self._lost.wait(_NOTICE_S)
        return RankLost(self._text or f"an exchange between the ranks failed: {cause}")

    def on_lost(self, function: Callable[[str], None]) -> None:
        """Have a function called, on a thread of its own, when a rank has ended by itself; at once if one has."""
        self._on_lost = function
        if self._lost.is_set():
            function(self._text)

    @property
    def process_ids(self) -> list[int]:
        """Of ranks 1 and up."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End the other ranks and leave the group. Idempotent."""
        self._closing.set()
        self._finalizer()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _start(self, setup: RankSetup) -> None:
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, "-m", "services.engine.rank", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
        theirs.close()
        pipe = Connection(ours.detach())
        self._processes.append(process)
        self._pipes.append(pipe)
        with contextlib.suppress(OSError):  # it has ended already: `wait` says so
            pipe.send(setup)

    def _note(self, rank: int, status: int) -> None:
        if self._closing.is_set():
            return
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit code {status}"
        self._text = f"rank {rank} of the engine ended {how}"
        self._lost.set()
        self._on_lost(self._text)


class LeadDecoder:
    """The first rank's decoder, with the others following: the same face as ``Decoder``."""

    def __init__(self, decoder: Decoder, ranks: Ranks) -> None:
        self._decoder, self.ranks = decoder, ranks
        self._told = False  # the others know which logits are next
        self.weight_bytes = decoder.weight_bytes

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: list[torch.Tensor],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Compute T tokens through every layer, as ``Decoder.forward``; the batch is one of ``LeadKernels``."""
        led: _LedBatch = batch
        self.ranks.tell(Forward(led.plan, kv[0].shape[0]))
        self._told = True
        try:
            share_fed(led.plan, token_ids)
            return self._decoder.forward(token_ids, positions, slots, kv, led.batch)
        except RuntimeError as error:  # whatever it was, the ranks are no longer at the same place
            raise self.ranks.lost(error) from error

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[L, vocabulary] logits of the [L] int64 rows of what ``forward`` returned last: first of the plan's rows."""
        if not self._told:  # the host waits for the rows here, and so for all that was launched before
            self.ranks.tell(Logits(rows.cpu().numpy()))
        self._told = False
        try:
            return self._decoder.logits(hidden, rows)
        except RuntimeError as error:
            raise self.ranks.lost(error) from error


@dataclass(frozen=True, slots=True)
class _LedBatch:
    plan: StepPlan
    batch: AttentionBatch


class LeadKernels:
    """What the runner asks of kernels beside ``LeadDecoder``: a batch that still knows its plan."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def prepare(self, plan: StepPlan, dtype: torch.dtype) -> AttentionBatch:
        """The kernels' batch, and the plan for the others."""
        return _LedBatch(plan, self._kernels.prepare(plan, dtype))


def _watch(ranks: weakref.ref[Ranks], rank: int, process: subprocess.Popen[bytes]) -> None:
    status = process.wait()
    alive = ranks()
    if alive is not None:
        alive._note(rank, status)  # noqa: SLF001 - its own thread


def _end(processes: list[subprocess.Popen[bytes]], pipes: list[Connection], folder: Path) -> None:
    """Close the pipes, at which ranks end; kill those that do not; remove the store."""
    for pipe in pipes:
        pipe.close()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_NOTICE_S)
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)
