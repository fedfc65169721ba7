"""Guarantees of a worker process: answers come through whatever it prints, and its failure is told with its words."""

import contextlib
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.bench.peers import contestants, worker
from headrace.bench.peers.workers import serving
from headrace.bench.results import RunFailed
from headrace.bench.workloads import Item
from services.engine.kernels import native
from tests.pipeline.conftest import until

Start = Callable[[str], worker.Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a worker that is given as source; `items` are what it is to generate."""
    with ExitStack() as stack:

        def start_one(body: str) -> worker.Worker:
            script = tmp_path / "engine.py"
            script.write_text(
                "import os, subprocess, sys\nfrom serving import check_length, serve\n"
                "print('noise before it is loaded')\n"
                f"def generate(items):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
                "serve('an engine', generate)\n"
            )
            environ = {**os.environ, "PYTHONPATH": str(Path(serving.__file__).parent)}
            made = worker.Worker("the engine", [sys.executable, str(script)], environ)
            stack.callback(made.close)
            return made

        yield start_one


ITEMS = [Item((1, 2, 3), 4), Item((5,), 6)]


def test_generates(start: Start) -> None:
    """Items arrive as they are; the engine's own prints are no answers."""
    engine = start(
        """
        print(items)
        assert items == [[[1, 2, 3], 4], [[5], 6]]
        return {"first_token_s": [0.25, 0.5]}
        """
    )
    assert engine.version == "an engine"
    for _ in range(2):
        done = engine.generate(ITEMS)
        assert done.tokens == 10
        assert done.seconds > 0
        assert done.first_token_s == [0.25, 0.5]


@pytest.mark.skipif(native.load() is not None, reason="the extension is not here")
def test_our_attention_is_measured() -> None:
    """A shape in, the milliseconds of a layer out: more keys take longer."""
    with ExitStack() as stack:
        ours = contestants.attention(stack, threads=1)
        assert isinstance(ours, contestants.Attention)
        shape = {"group": 3, "kv_heads": 3, "sequences": 2}
        short, long = (ours.worker.ask({**shape, "context": context})["ms"] for context in (64, 4096))
    assert 0 < short < long


def test_an_engine_rests_between_measurements(start: Start) -> None:
    """It is stopped whenever it is not asked, with the processes that it has started."""
    engine = start(
        """
        global child
        child = globals().get("child") or subprocess.Popen(['sleep', '1000'])
        return {"first_token_s": []}
        """
    )
    for _ in range(2):
        until(lambda: _states(engine.process_id) == {"T"}, 10, "all are stopped")
        engine.generate(ITEMS)
    until(lambda: _states(engine.process_id) == {"T"}, 10, "all are stopped")
    engine.close()
    until(lambda: not _states(engine.process_id), 10, "all are gone")


def test_an_engine_that_stops_early_is_no_measurement(start: Start) -> None:
    """What it wrote last is in the error, and it stays an error."""
    engine = start("check_length(3, 4)")
    for _ in range(2):
        with pytest.raises(RunFailed, match=r"the engine ended; it wrote: .*3 tokens came instead of 4"):
            engine.generate(ITEMS)


def test_an_engine_that_cannot_be_run() -> None:
    """The command is named."""
    with pytest.raises(RunFailed, match="the engine: /nowhere/python cannot be run"):
        worker.Worker("the engine", ["/nowhere/python"], {})


def test_an_engine_that_hangs_is_given_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the limit it is ended, together with what it has started."""
    engine = start("subprocess.run(['sleep', '1000'])")
    monkeypatch.setattr(worker, "GENERATE_TIMEOUT_S", 0.2)
    with pytest.raises(RunFailed, match=r"did not answer in 0\.2 s"):
        engine.generate(ITEMS)
    until(lambda: not _states(engine.process_id), 10, "all are gone")


def _states(group: int) -> set[str]:
    """Of the processes of a group that have not ended."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, its_group = (process / "stat").read_text().rpartition(") ")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.add(state)
    return found
