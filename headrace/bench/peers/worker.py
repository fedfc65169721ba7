"""A worker process, as the measuring process sees it: items in, seconds out. Knows pipes; no engine."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.bench.peers.figures import Generated
from headrace.bench.peers.workers.serving import ANSWERS_FD
from headrace.bench.results import RunFailed
from headrace.bench.workloads import Item

LOAD_TIMEOUT_S = 600.0
GENERATE_TIMEOUT_S = 300.0
LEAVE_TIMEOUT_S = 10.0
_SHOWN_LINES = 4  # of what a worker wrote before it failed


class Worker:
    """A process that generates when it is asked. In between it is stopped, with all that it has started.

    Some engines spin while they have nothing to do, and would take a core from whoever is measured.

    Args:
        name: for errors.
        command: what to run; it talks as `workers.serving` does.
        environ: of the process, whole.

    Raises:
        RunFailed: it does not start, or does not load; what it wrote last is in the message.
    """

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        reading, writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                env={**environ, ANSWERS_FD: str(writing)},
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                text=True,
                pass_fds=(writing,),
                start_new_session=True,  # so that its children can be ended with it
            )
        except OSError as error:
            os.close(reading)
            self._log.close()
            raise RunFailed(f"{name}: {command[0]} cannot be run ({error.strerror})") from error
        finally:
            os.close(writing)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()  # "": it has closed its end
        threading.Thread(target=self._read, args=(reading,), daemon=True).start()
        try:
            self.version: str = self._answer(LOAD_TIMEOUT_S)["ready"]
        except RunFailed:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def generate(self, items: Sequence[Item]) -> Generated:
        """Has it generate; see `figures.Generate`. Raises RunFailed."""
        return Generated(**self.ask([(item.prompt, item.output) for item in items]))

    def ask(self, question: Any) -> dict[str, Any]:
        """Its answer. Raises RunFailed."""
        self._signal(signal.SIGCONT)
        try:
            self._pipe.write(json.dumps(question, separators=(",", ":")) + "\n")
            self._pipe.flush()
        except OSError:
            raise self._ended() from None
        answer = self._answer(GENERATE_TIMEOUT_S)
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """Ends the process and whatever it has started."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_TIMEOUT_S)
        self._kill()
        self._log.close()

    @property
    def process_id(self) -> int:
        """Of the process, and of the group of all that it starts."""
        return self._process.pid

    @property
    def _pipe(self) -> Any:
        return self._process.stdin

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as answers:
            for line in answers:
                self._answers.put(line)
        self._answers.put("")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failure(f"did not answer in {timeout_s:g} s") from None
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> RunFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may still be writing why
            self._process.wait(LEAVE_TIMEOUT_S)
        return self._failure("ended")

    def _failure(self, what: str) -> RunFailed:
        self._kill()
        self._log.seek(0)
        last = " | ".join([line for line in self._log.read().splitlines() if line.strip()][-_SHOWN_LINES:])
        return RunFailed(f"{self._name} {what}; it wrote: {last or 'nothing'}")

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
