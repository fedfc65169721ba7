"""Guarantees of the waiting line: bounds first, then class, then who has waited longest for the least."""

from __future__ import annotations

import pytest

from services.engine.request import Priority
from services.engine.waiting import WaitingLine, WaitingPolicy
from tests.engine.factories import make_request

SECOND_NS = 1_000_000_000


def _line(*specifications: tuple[int, Priority, int, float]) -> WaitingLine:
    """A line of (id, class, prompt length, seconds waited at second 100)."""
    line = WaitingLine(WaitingPolicy())
    for request_id, priority, length, waited_s in specifications:
        arrival_ns = int((100 - waited_s) * SECOND_NS)
        line.put(make_request(request_id, prompt=[1] * length, priority=priority, arrival_ns=arrival_ns))
    return line


def _order(line: WaitingLine) -> list[int]:
    return [request.request_id for request in line.in_order(100 * SECOND_NS)]


def test_overdue_requests_go_first_whatever_their_class() -> None:
    """A batch request past 60 s and a standard one past 10 s: each goes before whoever is not overdue."""
    line = _line(
        (1, Priority.INTERACTIVE, 5, 1),
        (2, Priority.STANDARD, 5, 11),
        (3, Priority.BATCH, 5, 61),
        (4, Priority.BATCH, 5, 59),
        (5, Priority.STANDARD, 5, 9),
    )
    assert _order(line) == [2, 1, 3, 5, 4]
    for request_id, rest in ((2, [1, 3, 5, 4]), (1, [3, 5, 4]), (3, [5, 4])):
        line.start(next(r for r in line if r.request_id == request_id), 100 * SECOND_NS)
        assert _order(line) == rest


def test_a_flood_of_overdue_requests_leaves_every_second_place() -> None:
    """Three standard requests are overdue; two interactive ones that just came wait for one of them each."""
    standard = [(i, Priority.STANDARD, 5, 30.0 - i) for i in range(3)]
    line = _line(*standard, (10, Priority.INTERACTIVE, 5, 0), (11, Priority.INTERACTIVE, 6, 0))
    started = []
    while len(line):
        first = line.in_order(100 * SECOND_NS)[0]
        line.start(first, 100 * SECOND_NS)
        started.append(first.request_id)
    assert started == [0, 10, 1, 11, 2]


def test_cached_prompts_count_as_short() -> None:
    """What is in the prefix cache need not be computed, so it does not count."""
    line = _line((1, Priority.STANDARD, 50, 1), (2, Priority.STANDARD, 400, 1))
    assert _order(line) == [1, 2]
    next(r for r in line if r.request_id == 2).predicted_cached_count = 390
    assert _order(line) == [2, 1]


def test_requests_without_credits_are_not_offered() -> None:
    """They stay in line and keep their arrival."""
    line = _line((1, Priority.STANDARD, 5, 1), (2, Priority.STANDARD, 5, 2))
    next(iter(line)).credit_limit = 0
    assert _order(line) == [2]
    assert len(line) == 2


def _flood_and_quiet(line: WaitingLine, weight: float = 1.0) -> None:
    """Six requests of one key, which came first and are short, and three of another."""
    for request_id in range(9):
        flood = request_id < 6
        line.put(
            make_request(
                request_id,
                prompt=[1] * (10 if flood else 20),
                arrival_ns=(95 if flood else 99) * SECOND_NS,
                fair_key=b"flood" if flood else b"quiet",
                fair_weight=1.0 if flood else weight,
            )
        )


@pytest.mark.parametrize(("weight", "order"), [(1.0, [0, 6, 1, 2, 7, 3, 4, 8, 5]), (4.0, [0, 6, 7, 1, 8, 2, 3, 4, 5])])
def test_keys_take_turns_by_tokens_and_weight(weight: float, order: list[int]) -> None:
    """Whoever has much in the line waits for itself; the line knows what goes before as given."""
    line = WaitingLine(WaitingPolicy())
    _flood_and_quiet(line, weight)
    assert _order(line) == order


def test_what_a_key_was_given_counts_against_it() -> None:
    """Prompts that were started and tokens that were generated; whoever had less goes first, then they take turns."""
    line = WaitingLine(WaitingPolicy())
    first = make_request(100, prompt=[1] * 10, fair_key=b"flood")
    line.put(first)
    line.start(first, 100 * SECOND_NS)
    line.fair.give(b"flood", 15, 1.0)
    _flood_and_quiet(line)
    assert _order(line) == [6, 7, 0, 1, 8, 2, 3, 4, 5]


def test_recomputing_costs_a_key_nothing() -> None:
    """A preemption is the engine's doing."""
    line = WaitingLine(WaitingPolicy())
    request = make_request(1, prompt=[1] * 10, fair_key=b"k")
    for preempted_ns in (0, 99 * SECOND_NS):
        line.put(request)
        request.preempted_since_ns = preempted_ns
        line.start(request, 100 * SECOND_NS)
    assert line.fair.at(b"k") == 10


def test_a_preempted_request_goes_before_its_class() -> None:
    """It has had its turn before, and its blocks may still be cached."""
    line = _line((1, Priority.STANDARD, 5, 9), (2, Priority.STANDARD, 50, 9))
    preempted = next(r for r in line if r.request_id == 2)
    preempted.preempted_since_ns = 99 * SECOND_NS
    assert _order(line) == [2, 1]
