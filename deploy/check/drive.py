"""What deploy/check.sh asks of a running stack; prints one line of JSON, exits 1 with a reason where it is wrong.

python drive.py ask TARGET TRACES_URL               one question; its trace must hold spans of the four processes
python drive.py strike TARGET CONTAINER HOW         16 resumable streams; CONTAINER is killed and started (HOW: kill)
                                                    or stopped in order and started (HOW: stop) while they run

CHECK_CA: a file of authorities; the stack is behind TLS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

from headrace import Client
from headrace.errors import Unavailable

QUESTION = "What is the capital of France? Answer in one sentence."
PROCESSES = {"headrace-gateway", "headrace-tokenizer", "headrace-stream", "headrace-engine"}
TLS = os.environ.get("CHECK_CA") or False
STREAMS, TOKENS, WAIT_S = 16, 96, 120.0


class Wrong(Exception):
    """The stack did not do what it should."""


def ask(target: str, traces_url: str) -> dict[str, Any]:
    """One answer and its trace."""
    begun = time.monotonic()
    with Client(target, tls=TLS) as client:
        if not client.wait_until_connected(WAIT_S):
            raise Wrong(f"nobody answers at {target}")
        while True:
            try:
                answer = client.generate(messages=[("user", QUESTION)], max_tokens=32, temperature=0, timeout=WAIT_S)
                break
            except Unavailable:  # it answers before it serves
                if time.monotonic() - begun > WAIT_S:
                    raise
                time.sleep(0.2)
    took_s = time.monotonic() - begun
    if "Paris" not in answer.text:
        raise Wrong(f"the answer is {answer.text!r}")
    found = spans(traces_url, answer.trace_id)
    return {"text": answer.text, "took_s": round(took_s, 2), "trace": answer.trace_id, "spans": found}


def spans(traces_url: str, trace_id: str) -> int:
    """Number of spans of a trace, once all four processes have sent theirs."""
    seen: set[str] = set()
    end = time.monotonic() + 15
    while time.monotonic() < end:
        with urllib.request.urlopen(f"{traces_url}/api/traces/{trace_id}", timeout=5) as answer:  # noqa: S310
            data = json.load(answer)["data"]
        if data:
            # Jaeger names a process by a key into its table, the stand-in by the name itself.
            table = data[0].get("processes", {})
            keys = [span.get("processID") or span["process"] for span in data[0]["spans"]]
            seen = {table.get(key, {}).get("serviceName", key) for key in keys}
            if seen >= PROCESSES:
                return len(keys)
        time.sleep(0.3)
    raise Wrong(f"trace {trace_id} has spans of {sorted(seen)} alone")


class Reader(threading.Thread):
    """Reads one resumable stream to its end."""

    def __init__(self, client: Client, number: int) -> None:
        super().__init__(daemon=True)
        self._client, self._number = client, number
        self.numbers: list[int] = []
        self.text, self.error, self.tokens, self.resumed = "", "", 0, 0
        self.longest_gap_s = 0.0

    def run(self) -> None:
        """Reads."""
        prompt = f"Story number {self._number}: once upon a time"
        last = time.monotonic()
        try:
            stream = self._client.stream(prompt, resumable=True, max_tokens=TOKENS, ignore_eos=True, temperature=0)
            for delta in stream:
                now = time.monotonic()
                if self.numbers:
                    self.longest_gap_s = max(self.longest_gap_s, now - last)
                last = now
                self.text += delta.text
                self.numbers.append(delta.sequence_number)
            self.tokens = stream.answer.usage.completion_token_count
            self.resumed = stream.resume_count
            if stream.answer.text != self.text:
                self.error = "the text of the answer is not that of its deltas"
        except Exception as error:  # noqa: BLE001 - what check.sh reports
            self.error = f"{type(error).__name__}: {error}"


def strike(target: str, container: str, how: str) -> dict[str, Any]:
    """Sixteen streams; a container goes and comes back once all have begun."""
    with Client(target, tls=TLS) as client:
        if not client.wait_until_connected(WAIT_S):
            raise Wrong(f"nobody answers at {target}")
        begun = time.monotonic()
        readers = [Reader(client, number) for number in range(STREAMS)]
        for reader in readers:
            reader.start()
        while not all(len(reader.numbers) > 2 or reader.error for reader in readers):
            if time.monotonic() - begun > WAIT_S:
                raise Wrong("not every stream has begun")
            time.sleep(0.02)
        before = sum(bool(reader.tokens) for reader in readers)
        docker("kill" if how == "kill" else "stop", container)
        code = docker("inspect", "-f", "{{.State.ExitCode}}", container)
        docker("start", container)
        for reader in readers:
            reader.join(WAIT_S)
    lost = {
        n: r.error or f"{r.tokens} of {TOKENS} tokens" for n, r in enumerate(readers) if r.tokens != TOKENS or r.error
    }
    for number, reader in enumerate(readers):
        if reader.numbers != list(range(len(reader.numbers))):
            lost[number] = "messages are missing, doubled or out of order"
    report = {
        "container": docker("inspect", "-f", "{{.Name}}", container).strip("/"),
        "how": how,
        "exit_code": int(code),
        "ended_before": before,
        "whole": STREAMS - len(lost),
        "resumed": sum(reader.resumed > 0 for reader in readers),
        "longest_gap_s": round(max(reader.longest_gap_s for reader in readers), 2),
        "took_s": round(time.monotonic() - begun, 1),
    }
    if lost:
        raise Wrong(f"{json.dumps(report)} lost: {json.dumps(lost)}")
    if how == "stop" and int(code) != 0:
        raise Wrong(f"{container} ended with {code}")
    return report


def docker(*arguments: str) -> str:
    """One docker command; returns what it prints."""
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout.strip()  # noqa: S607


def main(arguments: list[str]) -> int:
    """Runs a command; returns the exit code."""
    commands = {"ask": ask, "strike": strike}
    try:
        sys.stdout.write(json.dumps(commands[arguments[0]](*arguments[1:])) + "\n")
    except Exception as error:  # noqa: BLE001 - one line, not a traceback
        sys.stderr.write(f"WRONG: {type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
