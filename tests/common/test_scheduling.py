"""Everything but the engine's thread gives way to it."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.common import scheduling

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="policies of Linux")


def policy_of_new_thread() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(os.sched_getscheduler, 0).result()


def test_threads_inherit_it_and_it_can_be_taken_back() -> None:
    """A thread that gave way starts others that do; one that takes precedence starts ordinary ones."""
    found: list[int] = []

    def body() -> None:
        scheduling.give_way()
        found.extend((os.sched_getscheduler(0), policy_of_new_thread()))
        scheduling.take_precedence()
        found.extend((os.sched_getscheduler(0), policy_of_new_thread()))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [os.SCHED_BATCH, os.SCHED_BATCH, os.SCHED_OTHER, os.SCHED_OTHER]


def test_where_it_is_forbidden_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that refuses does not keep a process from starting."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    scheduling.give_way()
