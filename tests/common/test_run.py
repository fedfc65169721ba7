"""A service as the first process of a container."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLOW_SERVICE = """
import sys
from services.common import run

def slow(name, **arguments):
    print(name, flush=True)
    sys.stdin.read()

run.runpy.run_module = slow
run.main("engine")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_service_is_there_ends_it(number: signal.Signals) -> None:
    """While the service is still being imported, a stop ends it at once, with 0."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_SERVICE], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout
        assert process.stdout.readline().strip() == "services.engine"
        process.send_signal(number)
        assert process.wait(10) == 0
