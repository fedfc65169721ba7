"""Tensor parallelism: what one rank computes, two compute together; and they end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.engine import ranks
from services.engine.engine import Engine
from services.engine.ranks import RankLost
from services.engine.request import SamplingParams
from tests.engine.factories import finish_all, make_engine, make_request, tiny_config, write_model
from tests.engine.model.test_parity import FAMILIES
from tests.pipeline.conftest import until

PROMPTS = [[5, 6, 7], [(11 * i * i + 3 * i) % 97 for i in range(40)], [90]]
LIMIT_S = 30


@contextmanager
def _two_ranks(path: Path, **changes: Any) -> Iterator[Engine]:
    engine = make_engine(path, tensor_parallel=2, **changes)
    try:
        yield engine
    finally:
        engine.close()


def _answers(engine: Engine) -> tuple[dict[int, list[int]], list[float]]:
    """Ids of each request, and the log probabilities of the first one's prompt."""
    requests = [make_request(i, prompt=prompt, max_tokens=9) for i, prompt in enumerate(PROMPTS)]
    requests[0].sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    return finish_all(engine, *requests), [entry.logprob for entry in requests[0].prompt_logprobs]


def _other(engine: Engine) -> int:
    """The process of rank 1."""
    (pid,) = engine._runner._decoder.ranks.process_ids  # type: ignore[union-attr]
    return pid


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_two_ranks_give_the_ids_of_one(tmp_path: Path) -> None:
    """Prefill in chunks, decode in a batch, a step ahead: the same ids; each has half of the KV; closed, none is left.

    The model has biases, of which that after a sum is added once, and one tensor of 97 rows, which does not halve, for
    embedding and head.
    """
    shape = {"num_attention_heads": 6, "hidden_size": 96, "tie_word_embeddings": True}
    path = write_model(tmp_path, {**FAMILIES["llama-bias"], **shape})
    alone = make_engine(path, max_chunk_tokens=16)
    told: list[str] = []
    with _two_ranks(path, max_chunk_tokens=16, async_scheduling="on") as engine:
        engine.on_lost(told.append)
        (found, explained), (expected, told_alone) = _answers(engine), _answers(alone)
        assert found == expected
        assert explained == pytest.approx(told_alone, abs=1e-4)
        assert len(explained) == 2
        assert 2 * engine.memory.kv_bytes_per_token == alone.memory.kv_bytes_per_token
        assert engine.memory.weight_bytes < alone.memory.weight_bytes
        other = _other(engine)
        assert not _gone(other)
    assert _gone(other)
    assert told == []


def test_a_model_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    """Three ranks of two key/value heads: the setting and the number are named, before any process starts."""
    path = write_model(tmp_path, tiny_config())
    with pytest.raises(ValueError, match=r"^tensor_parallel is 3; it must divide the model's 2 key/value heads"):
        make_engine(path, tensor_parallel=3)


def test_a_rank_that_dies_ends_the_engine(tmp_path: Path) -> None:
    """The next step raises, naming the rank and the signal; no request is blamed, none computed again."""
    with _two_ranks(write_model(tmp_path, tiny_config())) as engine:
        told: list[str] = []
        engine.on_lost(told.append)
        engine.add(make_request(1))
        engine.step()
        os.kill(_other(engine), signal.SIGKILL)
        with pytest.raises(RankLost, match=r"^rank 1 of the engine ended by SIGKILL$"):
            engine.step()
        assert told == ["rank 1 of the engine ended by SIGKILL"]


def test_a_rank_that_cannot_start_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends before it joins the others: the engine's start fails at once, saying which."""
    monkeypatch.setattr(ranks.sys, "executable", "/bin/false")
    with pytest.raises(RankLost, match=r"^rank 1 of the engine ended with exit code 1$"):
        make_engine(write_model(tmp_path, tiny_config()), tensor_parallel=2)


@pytest.mark.parametrize("victim", ["another rank", "the first rank"])
def test_the_process_ends_with_its_ranks(tmp_path: Path, victim: str) -> None:
    """Idle or not: a lost rank is an error in the log and exit code 1; of a lost engine no rank is left."""
    path = write_model(tmp_path / "model", tiny_config())
    log = tmp_path / "log"
    environment = {
        **os.environ,
        "HEADRACE_MODEL": str(path),
        "HEADRACE_ENGINE_PORT": "0",
        "HEADRACE_ENGINE_TENSOR_PARALLEL": "2",
        "HEADRACE_ENGINE_KV_BLOCKS": "64",
        "HEADRACE_ENGINE_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "services.engine"], env=environment, stdout=file, stderr=file)
    try:
        until(lambda: '"serving"' in log.read_text() or process.poll() is not None, LIMIT_S, "it serves")
        (other,) = _children(process.pid)
        os.kill(other if victim == "another rank" else process.pid, signal.SIGKILL)
        status = process.wait(LIMIT_S)
        until(lambda: _gone(other), LIMIT_S, "rank 1 has ended")
        if victim == "another rank":
            assert status == 1
            assert "rank 1 of the engine ended by SIGKILL" in log.read_text()
    finally:
        process.kill()
        process.wait()
