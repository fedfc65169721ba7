"""Guarantees of the supervisor, with tiny programs in place of the services."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.cli.deaths import Death, reason_of
from headrace.cli.supervisor import Program, ProgramDied, StopAsked, Supervisor

WAIT_S = 20.0
SERVES = "import signal, time; print('up', flush=True); signal.pause()"
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print('term', flush=True))
print('up', flush=True)
while True: signal.pause()
"""
POLITE = """
import signal, sys
def end(*_):
    print('ending', flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print('up', flush=True)
while True: signal.pause()
"""


def program(name: str, code: str) -> Program:
    return Program(name, (sys.executable, "-c", code), dict(os.environ))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def start() -> Iterator[Callable[..., Supervisor]]:
    started: list[Supervisor] = []

    def make(**codes: str) -> Supervisor:
        supervisor = Supervisor([program(name, code) for name, code in codes.items()])
        started.append(supervisor)
        supervisor.start()
        return supervisor

    yield make
    for supervisor in started:
        supervisor.stop(at_once=True)
        assert all(gone(pid) for pid in supervisor.pids.values())


def up(supervisor: Supervisor) -> None:
    for name in supervisor.pids:
        until(lambda name=name: "up" in supervisor.lines(name))  # type: ignore[misc]


def test_one_dies(start: Callable[..., Supervisor]) -> None:
    """The death of one program is told with its exit code and its own reason; the others can then be stopped."""
    dies = "import sys; sys.stderr.write('cannot go on reason=no weights service=b\\nstopped\\n'); sys.exit(3)"
    supervisor = start(a=SERVES, b=dies)
    with pytest.raises(ProgramDied) as caught:
        supervisor.wait(WAIT_S)
    assert caught.value.death == Death("b", 3, "no weights", "stopped")
    assert str(caught.value) == "b ended (exit code 3): no weights"
    assert supervisor.stop(at_once=True)
    with pytest.raises(ProgramDied):
        supervisor.wait(0)


def test_one_is_killed(start: Callable[..., Supervisor]) -> None:
    """A program that is killed is told by the signal's name."""
    supervisor = start(a=SERVES, b=SERVES)
    up(supervisor)
    os.kill(supervisor.pids["b"], signal.SIGKILL)
    with pytest.raises(ProgramDied, match=r"b ended \(killed by SIGKILL\); its last line: up"):
        supervisor.wait(WAIT_S)


def test_death_while_waiting_to_be_ready(start: Callable[..., Supervisor]) -> None:
    """A program that dies during the start ends the waiting."""
    supervisor = start(a=SERVES, b="raise SystemExit('bad model')")
    with pytest.raises(ProgramDied, match="bad model"):
        supervisor.wait_ready(lambda: False, WAIT_S)


def test_never_ready(start: Callable[..., Supervisor]) -> None:
    """Waiting to be ready has an end."""
    with pytest.raises(TimeoutError):
        start(a=SERVES).wait_ready(lambda: False, 0.05)


def test_stops_in_order() -> None:
    """A stop goes through the programs backwards, each after the other has ended; lines are handed on."""
    heard: list[tuple[str, str]] = []
    supervisor = Supervisor([program(name, POLITE) for name in "abc"], lambda *line: heard.append(line))
    supervisor.start()
    up(supervisor)
    assert supervisor.stop(grace_s=WAIT_S)
    until(lambda: len(heard) == 6)
    assert [name for name, line in heard if line == "ending"] == ["c", "b", "a"]


def test_asked_to_stop(start: Callable[..., Supervisor]) -> None:
    """`ask_to_stop`, from a signal handler or another thread, wakes `wait`."""
    supervisor = start(a=SERVES)
    threading.Timer(0, supervisor.ask_to_stop).start()
    with pytest.raises(StopAsked):
        supervisor.wait(WAIT_S)


def test_second_request_forces(start: Callable[..., Supervisor]) -> None:
    """While a program takes its time to end, a second request makes the stop a forced one."""
    supervisor = start(a=STUBBORN)
    up(supervisor)
    supervisor.ask_to_stop()
    stopping = threading.Thread(target=supervisor.stop, kwargs={"grace_s": 600.0})
    stopping.start()
    until(lambda: "term" in supervisor.lines("a"))
    supervisor.ask_to_stop()
    stopping.join(WAIT_S)
    assert not stopping.is_alive()
    assert gone(supervisor.pids["a"])


def test_stubborn_program_is_killed(start: Callable[..., Supervisor]) -> None:
    """A program that ignores two SIGTERMs is killed, and `stop` says so."""
    supervisor = start(a=STUBBORN)
    up(supervisor)
    assert supervisor.stop(at_once=True) is False
    assert supervisor.lines("a").count("term") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")
def test_programs_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    """Kill -9 of the supervisor leaves no program behind."""
    code = f"""
import os, sys
from headrace.cli.supervisor import Program, Supervisor
supervisor = Supervisor([Program(n, (sys.executable, "-c", {STUBBORN!r}), dict(os.environ)) for n in "ab"])
supervisor.start()
while not all("up" in supervisor.lines(n) for n in "ab"): pass
print(*supervisor.pids.values(), flush=True)
supervisor.wait()
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    until(lambda: all(gone(pid) for pid in pids))


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], ""),
        (["a", "b", ""], ""),
        (["headrace e: X=1: expected y", "headrace e: Z=2: expected w"], "X=1: expected y; Z=2: expected w"),
        (["12:00:00 [error] cannot go on reason=the port is in use service=e", "stopped"], "the port is in use"),
        (["12:00:00 [error] cannot go on reason='a b' service=e"], "a b"),
        (['{"reason": "no \\"x\\"", "event": "cannot go on"}', '{"event": "stopped"}'], 'no "x"'),
    ],
)
def test_reason_of(lines: list[str], reason: str) -> None:
    """The reason is what the process said, in either log format, not its last line."""
    assert reason_of("e", lines) == reason
