"""A further rank of an engine under tensor parallelism: `python -m services.engine.rank PIPE PARENT_PID`.

Started by ``ranks`` alone. It computes its part of what the first rank tells it, until the pipe ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

import torch

from services.common import scheduling
from services.engine.computing import make_part
from services.engine.model.config import load_config
from services.engine.model.shard import Shard
from services.engine.placement import Placement
from services.engine.ranks import READY, Forward, Logits, RankSetup, join, share_fed
from services.engine.runner import allocate_kv, tensors_of
from services.engine.transfer import to_device

_LOOK_EVERY_S = 1.0


def serve(setup: RankSetup, pipe: Connection) -> None:
    """Load the rank's part and compute what comes; EOFError at the end."""
    config = setup.config
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model, shard = load_config(config.model_dir), Shard(setup.rank, config.tensor_parallel)
    placement = Placement.choose(config, model, setup.rank)
    pipe.send(READY)
    join(setup.rank, config.tensor_parallel, setup.store, placement.device)
    decoder, kernels = make_part(config, model, placement, setup.length, shard)
    pipe.send(READY)
    kv: list[torch.Tensor] = []
    hidden = torch.empty(0)
    while True:
        message = pipe.recv()
        if isinstance(message, Logits):
            decoder.logits(hidden, torch.from_numpy(message.rows).to(placement.device))
        elif isinstance(message, Forward):
            if not kv or kv[0].shape[0] != message.block_count:
                kv.clear()  # before the new one is taken
                kv = allocate_kv(
                    shard.of(model), message.block_count - 1, config.block_size, placement.kv_dtype, placement.device
                )
            batch = kernels.prepare(message.plan, placement.dtype)
            token_ids, positions, slots = tensors_of(message.plan, placement.device)
            share_fed(message.plan, token_ids)
            hidden = decoder.forward(token_ids, positions, slots, kv, batch)
            decoder.logits(hidden, to_device(message.plan.logit_rows, placement.device).long())


def main(arguments: list[str]) -> None:
    """Serve until the first rank closes the pipe, or is gone."""
    scheduling.take_precedence()  # it was started by a thread that gives way
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the first rank decides when to end
    threading.Thread(target=_end_with, args=(int(arguments[1]),), daemon=True).start()
    with Connection(int(arguments[0])) as pipe:
        try:
            serve(pipe.recv(), pipe)
        except (EOFError, ConnectionResetError):
            return


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, even in the middle of an exchange."""
    tick = threading.Event()
    while os.getppid() == parent:
        tick.wait(_LOOK_EVERY_S)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
