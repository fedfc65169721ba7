"""`python -m services.common.run NAME`: a service as the first process of a container.

The kernel keeps signals from a container's first process until it has a handler for them. A service installs its own
once it is imported, which takes the engine some seconds; a SIGTERM before that would be lost, and the container killed
when its grace period is over. Here it has a handler from its first moment on: nothing has begun, so it just ends.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys


def main(name: str) -> None:
    """Runs `services.<name>` as `python -m` would, until it ends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    runpy.run_module(f"services.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1])
