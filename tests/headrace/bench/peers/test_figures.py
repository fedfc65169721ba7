"""Guarantees of what is measured of every engine."""

import itertools
from collections.abc import Sequence

import pytest

from headrace.bench import workloads
from headrace.bench.peers import figures
from headrace.bench.peers.figures import Generated
from headrace.bench.workloads import FIRST_ID, VOCABULARY_SIZE, Item


class Clockwork:
    """An engine whose prefix cache keeps everything: a millisecond an uncached prompt token, ten a step of decoding."""

    def __init__(self) -> None:
        self.asked: list[list[Item]] = []
        self.known: set[tuple[int, ...]] = set()

    def generate(self, items: Sequence[Item]) -> Generated:
        self.asked.append(list(items))
        prompt_tokens = sum(len(item.prompt) - self._cached(item.prompt) for item in items)
        self.known.update(item.prompt for item in items)
        seconds = 0.001 * prompt_tokens + 0.01 * max(item.output for item in items)
        return Generated(seconds, sum(item.output for item in items), [0.5] * len(items))

    def _cached(self, prompt: tuple[int, ...]) -> int:
        def common(known: tuple[int, ...]) -> int:
            pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, prompt, strict=False))
            return len(list(pairs))

        return max(map(common, self.known), default=0)


@pytest.mark.parametrize("figure", figures.FIGURES)
def test_every_number_has_prompts_of_its_own(figure: str) -> None:
    """No measurement finds its prompts in the cache of one before it; ids are of the vocabulary."""
    engine = Clockwork()
    figures.warm_up(engine.generate)
    first = figures.FIGURES[figure](engine.generate, 2)
    second = figures.FIGURES[figure](engine.generate, 3)
    assert second == pytest.approx(first)
    assert set(first) <= set(figures.VALUES)
    assert all(FIRST_ID <= id_ < VOCABULARY_SIZE for items in engine.asked for item in items for id_ in item.prompt)


def test_w1_is_the_workload() -> None:
    """The lengths are those of W1, and the first tokens of all requests are counted."""
    engine = Clockwork()
    values = figures.w1(engine.generate, 5)
    (items,) = engine.asked
    wanted = [chain[0] for chain in workloads.w1()]
    assert [(len(i.prompt), i.output) for i in items] == [(len(i.prompt), i.output) for i in wanted]
    assert values["w1-first-token"] == 0.5


def test_w2_keeps_its_shared_prefixes() -> None:
    """Of each turn only what is new is computed, by an engine that keeps everything."""
    engine = Clockwork()
    figures.w2(engine.generate, 5)
    assert [len(items) for items in engine.asked] == [6, 6, 6, 6]
    for before, after in itertools.pairwise(engine.asked):
        for one, following in zip(before, after, strict=True):
            assert following.prompt[: len(one.prompt)] == one.prompt
    assert len({items[0].prompt[:512] for items in engine.asked}) == 1


def test_decoding_is_measured_without_the_prompts() -> None:
    """Ten milliseconds a step: that is the time of a token, and 32 streams have 32 tokens in it."""
    assert figures.one_stream(Clockwork().generate, 5)["one-stream"] == pytest.approx(10)
    assert figures.decode_32(Clockwork().generate, 5)["decode-32"] == pytest.approx(3200)


def test_the_same_prompt_again() -> None:
    """The second time, 1,024 tokens are there already."""
    values = figures.prompt(Clockwork().generate, 5)
    assert values == pytest.approx({"prompt": 1034, "prompt-again": 10})
