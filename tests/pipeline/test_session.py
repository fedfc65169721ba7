"""GenerateSession: the reader's credits are exact, and a stream that lost its connection goes on without a seam."""

from __future__ import annotations

import queue

import grpc
import pytest

from headrace import errors
from headrace.answers import error_of as error_of_call
from headrace.v1 import gateway_pb2, gateway_pb2_grpc
from headrace.v1.gateway_pb2 import GenerateSessionRequest, SessionCancel, SessionCredits, SessionOpen, SessionResume
from headrace.v1.generation_pb2 import Generation, SamplingParameters, StopConditions
from tests.pipeline.conftest import start_pipeline, until

PROMPT = "Once upon a time, in a land far away,"
WHOLE = 60


class Session:
    """One call, by hand: commands go in through a queue."""

    def __init__(self, stub, first: GenerateSessionRequest):
        self._commands: queue.SimpleQueue[GenerateSessionRequest | None] = queue.SimpleQueue()
        self._commands.put(first)
        self.call = stub.GenerateSession(iter(self._commands.get, None), timeout=60)
        self.stream_id = ""
        self.messages: list[gateway_pb2.GenerateSessionResponse] = []

    def next(self):
        message = next(self.call)
        if message.HasField("opened"):
            assert message.sequence_number == -1
            self.stream_id = message.opened.stream_id
            return self.next()
        self.messages.append(message)
        return message

    def read(self, count=10**9):
        for _ in range(count):
            if self.next().HasField("final"):
                break
        return self

    def grant(self, count, index=0):
        self._commands.put(GenerateSessionRequest(credits=SessionCredits(credit_count=count, index=index)))

    def cancel(self):
        self._commands.put(GenerateSessionRequest(cancel=SessionCancel()))

    def drop(self):
        """Loses the connection, as a client that dies does."""
        self.call.cancel()
        self._commands.put(None)

    @property
    def tokens(self):
        return [token for message in self.messages for token in message.delta.token_ids]

    @property
    def text(self):
        return "".join(message.delta.text for message in self.messages)


def opening(credit_count=1000, **fields):
    fields.setdefault("prompt", PROMPT)
    fields.setdefault("max_tokens", WHOLE)
    fields.setdefault("sampling", SamplingParameters(temperature=1, seed=5))
    fields.setdefault("resumable", True)
    fields.setdefault("stop", StopConditions(ignore_eos=True))
    generation = Generation(include_token_ids=True, **fields)
    return GenerateSessionRequest(open=SessionOpen(generation=generation, credit_count=credit_count))


def resuming(stream_id, last, credit_count=1000):
    resume = SessionResume(stream_id=stream_id, last_sequence_number=last, credit_count=credit_count)
    return GenerateSessionRequest(resume=resume)


def error_of(work) -> errors.HeadraceError:
    with pytest.raises(grpc.RpcError) as caught:
        work()
    error = caught.value
    return error_of_call(error)


@pytest.fixture(scope="module")
def stub(pipeline):
    with grpc.insecure_channel(pipeline.target) as channel:
        yield gateway_pb2_grpc.GatewayServiceStub(channel)


@pytest.fixture(scope="module")
def whole(stub):
    """The undisturbed answer."""
    session = Session(stub, opening()).read()
    assert [message.sequence_number for message in session.messages] == list(range(len(session.messages)))
    assert len(session.tokens) == WHOLE
    return session


def test_credits_are_exact(pipeline, stub, whole):
    """Exactly as many tokens as granted are generated; more credits bring exactly as many more."""
    before = pipeline.engine_state().stats.decoded_token_count
    session = Session(stub, opening(credit_count=10))
    while len(session.tokens) < 10:
        session.next()
    until(lambda: pipeline.engine_state().stats.paused_count == 1, 10, "the pause")
    assert pipeline.engine_state().stats.decoded_token_count == before + 10
    session.grant(7)
    while len(session.tokens) < 17:
        session.next()
    until(lambda: pipeline.engine_state().stats.paused_count == 1, 10, "the second pause")
    assert pipeline.engine_state().stats.decoded_token_count == before + 17
    session.grant(1000)
    assert session.read().tokens == whole.tokens


@pytest.mark.parametrize("taken", [0, 1, 2, 5, 9])
def test_a_lost_connection_loses_nothing(pipeline, stub, whole, taken):
    """Dropped after each of several messages: every later message comes exactly once, in order."""
    first = Session(stub, opening(credit_count=1000))
    first.read(max(1, taken))
    first.messages = first.messages[:taken]
    first.drop()
    second = Session(stub, resuming(first.stream_id, taken - 1)).read()
    assert [m.sequence_number for m in first.messages + second.messages][:-1] == list(
        range(len(first.messages) + len(second.messages) - 1)
    )
    assert first.tokens + second.tokens == whole.tokens
    assert first.text + second.text == whole.text
    final = second.messages[-1].final
    assert final.usage.completion_token_count == WHOLE
    assert final.timings.resume_count == 1


def test_many_losses_in_one_answer(stub, whole):
    """Dropped after every second message: still the same answer."""
    session = Session(stub, opening())
    session.read(2)
    stream_id, messages = session.stream_id, list(session.messages)
    while not messages[-1].HasField("final"):
        session.drop()
        session = Session(stub, resuming(stream_id, messages[-1].sequence_number))
        session.read(2)
        messages += session.messages
    assert [token for message in messages for token in message.delta.token_ids] == whole.tokens


def test_generate_stream_names_its_stream_in_a_header(stub, whole):
    """A plain stream that asked for it can be resumed by a session."""
    generation = opening().open.generation
    call = stub.GenerateStream(gateway_pb2.GenerateStreamRequest(generation=generation), timeout=60)
    stream_id = dict(call.initial_metadata())["headrace-stream-id"]
    first = next(call)
    call.cancel()
    rest = Session(stub, resuming(stream_id, first.sequence_number)).read()
    assert list(first.delta.token_ids) + rest.tokens == whole.tokens


def test_a_finished_stream_can_be_read_again(stub, whole):
    """From any number, while it is kept."""
    again = Session(stub, resuming(whole.stream_id, 3)).read()
    assert again.messages[:-1] == whole.messages[4:-1]
    assert again.messages[-1].final.endings == whole.messages[-1].final.endings
    assert again.messages[-1].final.usage == whole.messages[-1].final.usage


def test_a_newer_reader_supersedes_the_older(stub, whole):
    """Two readers on one stream: the older one ends ABORTED (SUPERSEDED), the newer one gets the rest."""
    older = Session(stub, opening(credit_count=8))
    older.read(1)
    newer = Session(stub, resuming(older.stream_id, 0))
    rest = newer.read()
    error = error_of(older.read)
    assert (type(error), error.reason) == (errors.Aborted, "SUPERSEDED")
    assert list(older.messages[0].delta.token_ids) + rest.tokens == whole.tokens


def test_resume_is_held_back_by_its_credits(pipeline, stub, whole):
    """Messages that exist are sent up to the credits, by less than one message more."""
    session = Session(stub, opening(credit_count=40))
    session.read(1)
    until(lambda: pipeline.engine_state().stats.paused_count == 1, 10, "the pause")
    session.drop()
    again = Session(stub, resuming(session.stream_id, 0, credit_count=9))
    got = len(session.messages[0].delta.token_ids)
    while len(again.tokens) < 9:
        again.next()
    assert 9 <= len(again.tokens) < 9 + 8
    again.grant(1000)
    assert session.tokens[:got] + again.read().tokens == whole.tokens


@pytest.mark.parametrize(
    ("first", "field"),
    [
        (GenerateSessionRequest(), "command"),
        (GenerateSessionRequest(credits=SessionCredits(credit_count=1)), "command"),
        (opening(credit_count=0), "open.credit_count"),
        (opening(credit_count=-5), "open.credit_count"),
        (opening(credit_count=2**31 - 1), "open.credit_count"),
        (opening(prompt=""), "generation.prompt"),
        (resuming("x", -1, credit_count=0), "resume.credit_count"),
    ],
)
def test_a_bad_first_command_is_named(stub, first, field):
    """INVALID_ARGUMENT with the field."""
    error = error_of(Session(stub, first).read)
    assert (type(error), error.field) == (errors.InvalidArgument, field)


def test_bad_later_commands_are_named(pipeline, stub):
    """Negative and absurd credits, another answer's credits, a second open: named, and nothing is left behind."""
    before = pipeline.baseline()
    for count, index, field in (
        (0, 0, "credits.credit_count"),
        (-1, 0, "credits.credit_count"),
        (5, 3, "credits.index"),
    ):
        session = Session(stub, opening(credit_count=4, resumable=False))
        session.grant(count, index)
        error = error_of(session.read)
        assert (type(error), error.field) == (errors.InvalidArgument, field)
    session = Session(stub, opening(credit_count=4, resumable=False))
    session._commands.put(opening())
    assert error_of(session.read).field == "command"
    until(lambda: pipeline.baseline() == before, 2, "the baseline")


@pytest.mark.parametrize("last", [-7, 10**6])
def test_a_number_that_was_never_sent(stub, whole, last):
    """INVALID_ARGUMENT with the field."""
    error = error_of(Session(stub, resuming(whole.stream_id, last)).read)
    assert (type(error), error.field) == (errors.InvalidArgument, "resume.last_sequence_number")


def test_an_unknown_stream(stub):
    """NOT_FOUND (STREAM_NOT_FOUND)."""
    error = error_of(Session(stub, resuming("no-such-stream", -1)).read)
    assert (type(error), error.reason) == (errors.NotFound, "STREAM_NOT_FOUND")


def test_cancel_ends_it_for_good(pipeline, stub):
    """The call ends CANCELLED, the engine is free at once, and there is nothing to go on with but that ending."""
    before = pipeline.baseline()
    session = Session(stub, opening(max_tokens=4000))
    session.read(2)
    session.cancel()
    assert isinstance(error_of(session.read), errors.Cancelled)
    until(lambda: pipeline.baseline() == before, 2, "the baseline")
    again = error_of(Session(stub, resuming(session.stream_id, 1)).read)
    assert isinstance(again, errors.Cancelled)


@pytest.fixture(scope="module")
def impatient(default_model_dir, receiver):
    """A pipeline whose patience is short."""
    with start_pipeline(receiver, GATEWAY_SLOW_READER_S="1", STREAM_DETACHED_S="0.5") as pipeline:
        yield pipeline


def test_a_reader_without_credits_is_ended_and_can_resume(impatient, whole):
    """RESOURCE_EXHAUSTED (SLOW_CONSUMER) after the limit; KV is freed after the detachment; resuming has no seam."""
    with grpc.insecure_channel(impatient.target) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        before = impatient.baseline()
        session = Session(stub, opening(credit_count=8))
        error = error_of(session.read)
        assert (type(error), error.reason) == (errors.ResourceExhausted, "SLOW_CONSUMER")
        until(lambda: impatient.baseline() == before, 5, "the baseline")
        last = session.messages[-1].sequence_number
        rest = Session(stub, resuming(session.stream_id, last)).read()
        assert session.tokens + rest.tokens == whole.tokens
        assert session.text + rest.text == whole.text


def test_an_abandoned_stream_is_given_up(impatient):
    """A reader that vanishes and never comes back leaves nothing in the engine."""
    with grpc.insecure_channel(impatient.target) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        before = impatient.baseline()
        for _ in range(5):
            session = Session(stub, opening(max_tokens=4000))
            session.read(1)
            session.drop()
        until(lambda: impatient.baseline() == before, 5, "the baseline")
