"""Guarantees of the load: when requests are due, what is in them, and that the same seed makes the same ones."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from headrace.bench.load import logs, spec
from headrace.bench.load.lengths import BadLoad
from headrace.bench.load.spec import Leg, LoadSpec


def open_loop(**values: object) -> LoadSpec:
    return LoadSpec(**({"loop": "open", "legs": (Leg(10.0, seconds=10.0),)} | values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arrivals", "variation"), [("poisson", 1.0), ("constant", 0.0), ("gamma:2", 2.0), ("gamma:0.5", 0.5)]
)
def test_arrivals_have_their_rate_and_their_burstiness(arrivals: str, variation: float) -> None:
    """Mean and coefficient of variation of the gaps are those asked for."""
    load = open_loop(arrivals=arrivals, legs=(Leg(50.0, requests=20_000),))
    gaps = np.diff([at for _, at in load.due()])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.08)


def test_legs_follow_one_another() -> None:
    """A ramp of 5 and then 20 a second, three seconds each."""
    load = open_loop(arrivals="constant", legs=(Leg(5.0, seconds=3.0), Leg(20.0, seconds=3.0)))
    due = list(load.due())
    assert [sum(leg == number for leg, _ in due) for number in (0, 1)] == [15, 60]
    assert all((at >= 3.0 - 1e-9) == (leg == 1) for leg, at in due)


def test_the_same_seed_makes_the_same_requests_and_another_seed_others() -> None:
    """Times, ids and lengths; every process can make any conversation without the ones before it."""
    values = {"prompt": "10-99", "output": "1-9", "cancel_share": 0.3, "priorities": {"batch": 1, "standard": 3}}
    first, again, other = (open_loop(seed=seed, **values) for seed in (1, 1, 2))
    assert list(first.due()) == list(again.due()) != list(other.due())
    assert first.conversation(7) == again.conversation(7) != other.conversation(7)
    assert first.digest == again.digest != other.digest


def test_token_counts_are_exact() -> None:
    """A prompt has as many ids as its distribution says, within the vocabulary."""
    load = open_loop(prompt="33", output="7", shared_prefix=100)
    (turn,) = load.conversation(3).turns
    assert (len(turn.token_ids), turn.output) == (133, 7)
    assert all(1000 <= token < 49152 for token in turn.token_ids)


def test_conversations_of_a_group_share_their_prefix() -> None:
    """Two groups: two prefixes in all, and after them nothing is shared."""
    load = open_loop(prompt="16", shared_prefix=64, prefix_groups=2)
    made = [load.conversation(number).turns[0].token_ids for number in range(40)]
    assert len({ids[:64] for ids in made}) == 2
    assert len({ids[64:] for ids in made}) == 40


def test_shares_of_cancels_slow_readers_priorities_and_tenants() -> None:
    """Of 4,000 requests as many as asked for; none both leaves early and reads slowly."""
    load = open_loop(
        cancel_share=0.2, slow_share=0.1, priorities={"batch": 1, "interactive": 3}, tenants={"a": 1, "b": 1}
    )
    made = [load.conversation(number) for number in range(4_000)]
    turns = [one.turns[0] for one in made]
    assert np.mean([turn.cancel_after > 0 for turn in turns]) == pytest.approx(0.2, abs=0.02)
    assert np.mean([turn.pause_s > 0 for turn in turns]) == pytest.approx(0.1, abs=0.02)
    assert not any(turn.cancel_after and turn.pause_s for turn in turns)
    assert np.mean([one.priority == "interactive" for one in made]) == pytest.approx(0.75, abs=0.02)
    assert np.mean([one.tenant == "b" for one in made]) == pytest.approx(0.5, abs=0.03)


LOGS = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.0000000,374,44\n2023-11-16 18:17:04.5000000,396,109\n",
    "burstgpt.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,374,44,418,Conversation log\n6,ChatGPT,9,0,9,API log\n6.5,GPT-4,396,109,505,API log\n",
    "own.jsonl": '{"at_s": 8.5, "prompt_tokens": 396, "output_tokens": 109}\n'
    '{"at_s": 7, "prompt_tokens": 374, "output_tokens": 44}\n',
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_is_replayed_with_its_gaps_and_lengths(name: str, tmp_path: Path) -> None:
    """Three formats say the same; speed 2 halves the gap; what has no length is left out."""
    file = tmp_path / name
    file.write_text(LOGS[name], encoding="utf-8")
    assert logs.read(file) == [logs.Entry(0.0, 374, 44), logs.Entry(1.5, 396, 109)]
    load = open_loop(replay=str(file), replay_speed=2.0)
    assert list(load.due()) == [(0, 0.0), (0, 0.75)]
    turn = load.conversation(1).turns[0]
    assert (len(turn.token_ids), turn.output) == (396, 109)
    for leg in (Leg(0.0, seconds=0.75), Leg(0.0, requests=1)):  # as much of a long log as is wanted
        assert list(open_loop(replay=str(file), replay_speed=2.0, legs=(leg,)).due()) == [(0, 0.0)]


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", '{"at_s": "x", "prompt_tokens": 1, "output_tokens": 1}\n', "{", '{"at_s": 1}\n']
)
def test_a_log_that_cannot_be_read_is_refused_by_name(text: str, tmp_path: Path) -> None:
    """The error names the file."""
    file = tmp_path / "log"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BadLoad, match=str(file)):
        logs.read(file)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"arrivals": "gamma:0"}, "--arrivals"),
        ({"arrivals": "often"}, "--arrivals"),
        ({"cancel_share": 1.5}, "--cancel 1.5"),
        ({"cancel_share": 0.6, "slow_share": 0.6}, "--cancel and --slow-readers together 1.2"),
        ({"correlation": 2.0}, "--correlation 2.0"),
        ({"prefix_groups": 0}, "--shared-prefix: 0 groups"),
        ({"priorities": {"urgent": 1.0}}, "urgent"),
        ({"prompt": "none"}, "--prompt"),
    ],
)
def test_a_load_that_cannot_be_is_refused_by_name(values: dict[str, object], named: str) -> None:
    """At once, before anything is sent."""
    with pytest.raises(BadLoad, match=named):
        open_loop(**values)


def test_weights() -> None:
    """Names with weights, or without."""
    assert spec.weights("a:3,b:1", "--tenants") == {"a": 3.0, "b": 1.0}
    assert spec.weights("a,b", "--tenants") == {"a": 1.0, "b": 1.0}
    for text in ("a:0", "a:x", ":1"):
        with pytest.raises(BadLoad, match="--tenants"):
            spec.weights(text, "--tenants")


def test_correlated_lengths() -> None:
    """Long prompts get long answers where that is asked for."""
    load = open_loop(prompt="1-1000", output="1-1000", correlation=0.9)
    turns = list(itertools.chain.from_iterable(load.conversation(number).turns for number in range(2_000)))
    measured = np.corrcoef([len(turn.token_ids) for turn in turns], [turn.output for turn in turns])[0, 1]
    assert measured == pytest.approx(0.9, abs=0.03)
