"""Turns its own process into a program that dies with its parent: `python launcher.py PARENT_PID COMMAND...`.

The supervisor cannot ask the kernel for this in a `preexec_fn` (unsafe beside threads), and the services need not know
of it. So a child first runs this file, which asks and then executes the command: same process, same pid. It uses the
standard library alone and takes milliseconds. Where the kernel has no such request (not Linux), it only executes.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2): the signal to get when the thread that started this process ends


def main(arguments: list[str]) -> None:
    """Replaces this process by the command in `arguments[1:]`; `arguments[0]` is the pid of the parent."""
    parent = int(arguments[0])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)
    os.execv(arguments[1], arguments[1:])  # noqa: S606 - the supervisor's own argument list


if __name__ == "__main__":
    main(sys.argv[1:])
