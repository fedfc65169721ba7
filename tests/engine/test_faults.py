"""A fault while a step is computed ends the request that it belongs to, and the engine only when it is its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from services.engine.engine import Engine
from services.engine.request import FinishReason
from services.engine.step import ScheduledStep, StepResult
from tests.engine.factories import finish_all, make_engine, make_request, tiny_config, write_model

POISON = 13


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), tiny_config())


def _break(engine: Engine, *, everything: bool = False) -> None:
    """Let steps fail that hold the poisoned token, or all."""
    launch = engine._runner.launch

    def failing(planned: ScheduledStep) -> Callable[[], StepResult]:
        if everything or POISON in planned.plan.token_ids:
            raise RuntimeError("a kernel gave up")
        return launch(planned)

    engine._runner.launch = failing  # type: ignore[method-assign]


def test_a_sequence_that_cannot_be_computed_ends_alone(model: Path) -> None:
    """Beside it, three others get the tokens that they get alone; blocks go back; the error says what it was."""
    others = [{"prompt": [n, n + 1, n + 2], "max_tokens": 9} for n in (20, 40, 60)]
    alone = [finish_all(make_engine(model), make_request(1, **fields))[1] for fields in others]
    assert all(POISON not in tokens for tokens in alone)
    engine = make_engine(model)
    _break(engine)
    victim = make_request(9, prompt=[5, POISON, 6])
    answers = finish_all(engine, *(make_request(i, **fields) for i, fields in enumerate(others)), victim)
    assert [answers[i] for i in range(3)] == alone
    assert (victim.finish, victim.output_count) == (FinishReason.ERROR, 0)
    assert victim.error == "computing failed: RuntimeError: a kernel gave up"
    assert engine.stats().kv_block_free + engine.stats().kv_block_cached == 64


def test_a_fault_in_the_middle_of_a_prompt_ends_it_too(model: Path) -> None:
    """The poisoned chunk samples nothing, and is still an ending."""
    engine = make_engine(model, max_chunk_tokens=4)
    _break(engine)
    victim = make_request(1, prompt=[3, 4, 5, 6, POISON, 7, 8, 9, 10, 11], max_tokens=2)
    assert finish_all(engine, victim, make_request(2, prompt=[7]))[1] == []
    assert victim.finish is FinishReason.ERROR


def test_a_poisoned_request_alone_does_not_end_the_engine(model: Path) -> None:
    """Two in a row fail; a good one after them is answered, and patience begins anew."""
    engine = make_engine(model)
    expected = finish_all(make_engine(model), make_request(1))[1]
    _break(engine)
    for round_ in range(3):
        for number in (1, 2):
            victim = make_request(number, prompt=[POISON])
            finish_all(engine, victim)
            assert victim.finish is FinishReason.ERROR
        assert finish_all(engine, make_request(10 + round_))[10 + round_] == expected


def test_an_engine_that_computes_nothing_any_more_ends(model: Path) -> None:
    """The third lost step in a row lets the exception go on."""
    engine = make_engine(model)
    _break(engine, everything=True)
    for number in (1, 2):
        finish_all(engine, make_request(number), make_request(10 + number))
    engine.add(make_request(3))
    with pytest.raises(RuntimeError, match="a kernel gave up"):
        engine.step()
