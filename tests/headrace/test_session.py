"""Guarantees of what a client remembers of a stream, on a clock of its own."""

import pytest

from headrace import errors
from headrace.session import LONGEST_WAIT_S, Session, SessionOptions
from headrace.v1 import gateway_pb2, generation_pb2

LOST = errors.Unavailable("lost")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def session(clock: Clock, *, timeout_s: float | None = None, stream_id: str = "", **options: object) -> Session:
    given = SessionOptions(**options)  # type: ignore[arg-type]
    opening = None if stream_id else generation_pb2.Generation(prompt="hi")
    return Session(opening, given, timeout_s=timeout_s, stream_id=stream_id, clock=clock, draw=lambda: 1.0)


def opened(stream_id: str = "s") -> gateway_pb2.GenerateSessionResponse:
    names = gateway_pb2.SessionOpened(stream_id=stream_id)
    return gateway_pb2.GenerateSessionResponse(sequence_number=-1, opened=names)


def delta(number: int, tokens: int = 1, index: int = 0) -> gateway_pb2.GenerateSessionResponse:
    carried = gateway_pb2.Delta(text="x", token_count=tokens, index=index)
    return gateway_pb2.GenerateSessionResponse(sequence_number=number, delta=carried)


def test_opens_then_resumes(clock: Clock) -> None:
    """The first connection opens; once the stream has a name, the next ones resume after the last message seen."""
    made = session(clock, window=8)
    first = made.first_command()
    assert (first.open.generation.prompt, first.open.credit_count) == ("hi", 8)
    assert made.receive(opened()) is None
    for number in range(3):
        assert made.receive(delta(number)) is not None
    made.lost(LOST, by_transport=True)
    resume = made.first_command().resume
    assert (resume.stream_id, resume.last_sequence_number, resume.credit_count) == ("s", 2, 8)
    assert made.resume_count == 0
    made.receive(opened())
    assert made.resume_count == 1


def test_nothing_twice_and_nothing_missing(clock: Clock) -> None:
    """A message that was seen is dropped and earns no credits; one that is missing is an error."""
    made = session(clock, window=4)
    made.first_command()
    for message in (opened(), delta(0), delta(1)):
        made.receive(message)
    made.grant()
    assert made.receive(delta(0)) is None
    assert made.receive(delta(1)) is None
    assert made.grant() is None
    with pytest.raises(errors.Internal, match="message 3 of the stream came where 2 was expected"):
        made.receive(delta(3))


def test_a_message_of_a_newer_server_is_counted(clock: Clock) -> None:
    """An unknown event is passed over without a gap."""
    made = session(clock)
    made.receive(opened())
    assert made.receive(gateway_pb2.GenerateSessionResponse(sequence_number=0)) is None
    assert made.receive(delta(1)) is not None


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 16, 64])
@pytest.mark.parametrize("tokens", [1, 3])
def test_credits_are_what_was_taken(clock: Clock, window: int, tokens: int) -> None:
    """Granted in all: the window and what was taken, less what is not worth a message yet; never more."""
    made = session(clock, window=window)
    granted, taken = made.first_command().open.credit_count, 0
    made.receive(opened())
    for number in range(50):
        due = made.grant()
        granted += due.credits.credit_count if due else 0
        assert window + taken - max(1, window // 4) < granted <= window + taken
        made.receive(delta(number, tokens))
        taken += tokens


def test_credits_by_answer(clock: Clock) -> None:
    """Each of several answers earns its own credits."""
    made = session(clock, window=8)
    made.receive(opened())
    made.receive(delta(0, 1, index=0))
    assert made.grant() is None
    made.receive(delta(1, 2, index=3))
    due = made.grant()
    assert due is not None
    assert (due.credits.index, due.credits.credit_count) == (3, 2)


def test_a_new_connection_starts_with_a_whole_window(clock: Clock) -> None:
    """What was owed on the old connection is in the new one's window, and not granted again."""
    made = session(clock, window=8)
    made.receive(opened())
    made.receive(delta(0, 2))
    made.lost(LOST, by_transport=True)
    assert made.first_command().resume.credit_count == 8
    assert made.grant() is None


def test_waits_grow_and_end(clock: Clock) -> None:
    """Waits double from 50 ms to 2 s; after `resume_timeout` without a connection the error comes out."""
    made = session(clock, resume_timeout_s=10)
    made.receive(opened())
    waits = []
    with pytest.raises(errors.Unavailable):  # noqa: PT012
        while True:
            waits.append(made.lost(LOST, by_transport=True))
            clock.now += waits[-1]
    assert waits[:4] == pytest.approx([0.05, 0.1, 0.2, 0.4])
    assert max(waits) == LONGEST_WAIT_S
    assert 7 < sum(waits) <= 10


def test_only_time_without_a_connection_counts(clock: Clock) -> None:
    """A long prefill between two losses uses nothing up; connections that bring nothing new do."""
    made = session(clock, resume_timeout_s=5)
    made.receive(opened())
    for _ in range(3):
        clock.now += made.lost(LOST, by_transport=True)
        made.receive(opened())
        clock.now += 1000
    with pytest.raises(errors.Unavailable):  # noqa: PT012
        for _ in range(100):
            clock.now += made.lost(LOST, by_transport=True)
            made.receive(opened())


def test_progress_starts_anew(clock: Clock) -> None:
    """After a new message the waits are short again."""
    made = session(clock, resume_timeout_s=5)
    made.receive(opened())
    for number in range(100):
        assert made.lost(LOST, by_transport=True) == pytest.approx(0.05)
        clock.now += 3
        made.receive(delta(number))
    assert made.resume_count == 100


def test_the_servers_own_delay_counts(clock: Clock) -> None:
    """A server that says when to come again is not asked before."""
    made = session(clock)
    assert made.lost(errors.Unavailable("starting", retry_after_s=1.5), by_transport=True) == 1.5


def test_the_deadline_bounds_everything(clock: Clock) -> None:
    """No wait goes past the caller's deadline; then it is DeadlineExceeded."""
    made = session(clock, timeout_s=0.03)
    assert made.timeout_s() == pytest.approx(0.03)
    assert made.lost(LOST, by_transport=True) == pytest.approx(0.03)
    clock.now += 0.03
    with pytest.raises(errors.DeadlineExceeded):
        made.timeout_s()


def test_what_does_not_resume(clock: Clock) -> None:
    """A refusal of the request, a session that is not resumable, and a stream without a name end with their error."""
    made = session(clock)
    made.receive(opened())
    with pytest.raises(errors.InvalidArgument):
        made.lost(errors.InvalidArgument("bad"), by_transport=False)
    plain = session(clock, resumable=False)
    with pytest.raises(errors.Unavailable):
        plain.lost(LOST, by_transport=True)
    unnamed = session(clock)
    unnamed.receive(opened(""))
    unnamed.receive(delta(0))
    with pytest.raises(errors.Unavailable):
        unnamed.lost(LOST, by_transport=True)


def test_sent_again_only_if_nothing_came(clock: Clock) -> None:
    """Lost before the server named the stream, the request is sent once more, and that is no resuming."""
    made = session(clock)
    made.first_command()
    made.lost(LOST, by_transport=True)
    assert made.first_command().HasField("open")
    made.receive(opened())
    assert made.resume_count == 0


def test_bad_arguments(clock: Clock) -> None:
    """What no message can hold is InvalidArgument, and so is resuming nothing."""
    with pytest.raises(errors.InvalidArgument):
        session(clock, window=1 << 31).first_command()
    with pytest.raises(errors.InvalidArgument):
        Session(None, SessionOptions(), stream_id="s", last_sequence_number=1 << 63).first_command()
    with pytest.raises(errors.InvalidArgument):
        Session(None, SessionOptions())
