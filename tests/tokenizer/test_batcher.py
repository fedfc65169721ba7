"""Concurrent calls are encoded together, off the loop; no caller can spoil another's call."""

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.batcher import BatcherClosed, EncodeBatcher, Encoded, EncodeFailed, QueueFull
from services.tokenizer.chat import ChatRenderer
from services.tokenizer.inputs import (
    ChatInput,
    ChatMessage,
    EncodeInput,
    InputError,
    InputTooLarge,
    TextInput,
    UnknownTokenId,
)
from services.tokenizer.vocabulary import Vocabulary, VocabularyFacts


class ScriptedVocabulary:
    """Encodes a text to its length; blocks while `gate` is shut, fails on "bad", notes every batch."""

    def __init__(self) -> None:
        self.facts = VocabularyFacts(100, (), None, (), 1000, 16_000)
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.contexts: list[str] = []

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        self.entered.set()
        assert self.gate.wait(30)
        self.contexts.append(CALLER.get())
        self.batches.append(list(texts))
        if "panic" in texts:
            raise BaseException("a panic in the library")
        if "bad" in texts:
            raise RuntimeError("bad text in a batch")
        return [[len(text)] for text in texts]

    encode_marked = encode_texts

    def decode(self, token_ids: Sequence[int], include_special_tokens: bool = False) -> str:
        if -1 in token_ids:
            raise UnknownTokenId("-1", field="token_ids[0]")
        return f"{list(token_ids)}{include_special_tokens}"


CALLER: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="nobody")


@pytest.fixture
def scripted() -> ScriptedVocabulary:
    return ScriptedVocabulary()


Make = Callable[..., EncodeBatcher]


@pytest.fixture
async def make(scripted: ScriptedVocabulary) -> AsyncIterator[Make]:
    """Start batchers over the scripted vocabulary; each is closed at the end."""
    made: list[EncodeBatcher] = []

    def build(**options: Any) -> EncodeBatcher:
        made.append(EncodeBatcher(scripted, None, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    scripted.gate.set()
    for batcher in made:
        await batcher.close()


async def blocked(batcher: EncodeBatcher, scripted: ScriptedVocabulary) -> asyncio.Task[Encoded]:
    """Start the batcher and put its thread to work on a text that does not end before the gate opens."""
    await batcher.start()
    scripted.batches.clear()
    scripted.entered.clear()
    scripted.gate.clear()
    task = asyncio.create_task(batcher.encode(TextInput("first")))
    await asyncio.to_thread(scripted.entered.wait, 30)
    return task


async def turn() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_callers_that_wait_become_one_batch(make: Make, scripted: ScriptedVocabulary) -> None:
    batcher = make(max_batch_size=8)
    first = await blocked(batcher, scripted)
    later = [asyncio.create_task(batcher.encode(TextInput("x" * size))) for size in range(1, 11)]
    await turn()
    assert batcher.waiting == 11
    scripted.gate.set()
    results = await asyncio.gather(*later)
    assert [result.token_ids for result in results] == [[size] for size in range(1, 11)]
    assert [result.batch_size for result in results] == [8] * 8 + [2] * 2
    assert [len(batch) for batch in scripted.batches] == [1, 8, 2]
    assert (await first).batch_size == 1
    assert all(result.wait_ns >= 0 and result.encode_ns >= 0 for result in results)
    assert batcher.waiting == 0


async def test_a_batch_is_bounded_in_bytes(make: Make, scripted: ScriptedVocabulary) -> None:
    batcher = make(max_batch_bytes=100)
    await blocked(batcher, scripted)
    later = [asyncio.create_task(batcher.encode(TextInput("x" * 40))) for _ in range(5)]
    await turn()
    scripted.gate.set()
    assert [result.batch_size for result in await asyncio.gather(*later)] == [2, 2, 2, 2, 1]


async def test_a_large_input_does_not_hold_up_small_ones(make: Make, scripted: ScriptedVocabulary) -> None:
    """Its thread is at work, and a small call begins and ends meanwhile."""
    batcher = make(large_bytes=100)
    await batcher.start()
    order: list[str] = []
    small_done = threading.Event()
    original = scripted.encode_texts

    def encode(texts: Sequence[str]) -> list[list[int]]:
        if len(texts[0]) > 100:
            scripted.entered.set()
            assert small_done.wait(30)
            order.append("large")
        return original(texts)

    scripted.encode_texts = encode  # type: ignore[method-assign]
    scripted.entered.clear()
    large = asyncio.create_task(batcher.encode(TextInput("x" * 101)))
    await asyncio.to_thread(scripted.entered.wait, 30)
    await batcher.encode(TextInput("small"))
    order.append("small")
    small_done.set()
    assert (await large).token_ids == [101]
    assert order == ["small", "large"]


async def test_a_cancelled_caller_is_taken_out_and_spoils_nothing(make: Make, scripted: ScriptedVocabulary) -> None:
    """Cancelled while waiting: never encoded. Cancelled at work: the others get their answers."""
    batcher = make()
    first = await blocked(batcher, scripted)
    tasks = [asyncio.create_task(batcher.encode(TextInput("y" * size))) for size in (1, 2, 3)]
    await turn()
    first.cancel()
    tasks[1].cancel()
    await turn()
    assert batcher.waiting == 2
    scripted.gate.set()
    assert (await tasks[0]).token_ids == [1]
    assert (await tasks[2]).token_ids == [3]
    assert scripted.batches == [["first"], ["y", "yyy"]]
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await batcher.encode(TextInput("zz"))).token_ids == [2]
    assert batcher.waiting == 0


@pytest.mark.parametrize("word", ["bad", "panic"])
async def test_one_inputs_failure_is_its_own(make: Make, scripted: ScriptedVocabulary, word: str) -> None:
    batcher = make()
    first = await blocked(batcher, scripted)
    tasks = [asyncio.create_task(batcher.encode(TextInput(text))) for text in ("a", word, "ccc")]
    await turn()
    scripted.gate.set()
    assert (await tasks[0]).token_ids == [1]
    assert (await tasks[2]).token_ids == [3]
    with pytest.raises(EncodeFailed):
        await tasks[1]
    assert (await first).token_ids == [5]
    assert (await batcher.encode(TextInput("dd"))).token_ids == [2]


async def test_too_many_waiting_are_refused_at_once(make: Make, scripted: ScriptedVocabulary) -> None:
    batcher = make(max_waiting=3, max_waiting_bytes=1000)
    first = await blocked(batcher, scripted)
    second = asyncio.create_task(batcher.encode(TextInput("x" * 900)))
    await turn()
    with pytest.raises(QueueFull):
        await batcher.encode(TextInput("x" * 100))
    with pytest.raises(QueueFull):
        await batcher.encode_many([TextInput("x"), TextInput("x")])
    with pytest.raises(QueueFull):
        await batcher.decode([1] * 100)
    assert batcher.waiting == 2
    scripted.gate.set()
    await asyncio.gather(first, second)
    assert (await batcher.encode(TextInput("x" * 100))).token_ids == [100]


async def test_many_inputs_come_back_in_order(make: Make) -> None:
    batcher = make(large_bytes=5)
    await batcher.start()
    texts = ["x" * size for size in (9, 1, 7, 2, 3)]
    results = await batcher.encode_many([TextInput(text) for text in texts])
    assert [result.token_ids for result in results] == [[9], [1], [7], [2], [3]]
    assert await batcher.encode_many([]) == []


async def test_a_bad_input_among_many_is_named_by_its_place(vocabulary: Vocabulary, renderer: ChatRenderer) -> None:
    async with EncodeBatcher(vocabulary, renderer) as batcher:
        inputs: list[EncodeInput] = [TextInput("a"), ChatInput([]), ChatInput([])]
        with pytest.raises(InputError, match="at least one message") as caught:
            await batcher.encode_many(inputs)
        assert (caught.value.index, caught.value.field) == (1, "messages")
        assert batcher.waiting == 0


async def test_an_oversized_input_is_refused_before_any_work(make: Make, scripted: ScriptedVocabulary) -> None:
    batcher = make()
    await batcher.start()
    scripted.batches.clear()
    big = "x" * 16_001
    chat = ChatInput([ChatMessage("user", "x" * 8_001), ChatMessage("user", "\u00e9" * 4_000)])
    for index, inputs in enumerate(
        [[TextInput(big)], [TextInput("a"), TextInput("é" * 8_001)], [TextInput("a"), chat]]
    ):
        with pytest.raises(InputTooLarge, match=r"1600\d bytes; the limit is 16000") as caught:
            await batcher.encode_many(inputs)
        assert caught.value.index == min(index, 1)
    assert scripted.batches == []
    assert (await batcher.encode(TextInput("x" * 16_000))).token_ids == [16_000]


async def test_surrogates_are_refused(make: Make) -> None:
    """They are what the chat renderer marks callers' text with, and no valid text holds any."""
    batcher = make()
    await batcher.start()
    with pytest.raises(InputError, match="surrogates"):
        await batcher.encode(ChatInput([ChatMessage("user", "a\udc00")]))


async def test_a_chat_for_a_model_without_template_is_refused(make: Make) -> None:
    batcher = make()
    await batcher.start()
    with pytest.raises(InputError, match="no chat template"):
        await batcher.encode(ChatInput([ChatMessage("user", "hi")]))


async def test_decode_is_off_the_loop_and_checked(make: Make) -> None:
    batcher = make()
    await batcher.start()
    assert await batcher.decode((1, 2), include_special_tokens=True) == "[1, 2]True"
    with pytest.raises(UnknownTokenId):
        await batcher.decode([-1])
    assert batcher.waiting == 0


async def test_nobodys_context_is_at_work_in_the_background(make: Make, scripted: ScriptedVocabulary) -> None:
    """A batch belongs to several callers; the one that started the batcher is not one of them."""
    CALLER.set("the one who started it")
    batcher = make()
    await batcher.start()
    await batcher.encode(TextInput("x"))
    assert set(scripted.contexts) == {"nobody"}


async def test_closing_ends_whoever_waits(make: Make, scripted: ScriptedVocabulary) -> None:
    batcher = make()
    with pytest.raises(BatcherClosed):
        await batcher.encode(TextInput("too early"))
    first = await blocked(batcher, scripted)
    second = asyncio.create_task(batcher.encode(TextInput("x")))
    await turn()
    await batcher.close()
    for task in (first, second):
        with pytest.raises(BatcherClosed):
            await task
    with pytest.raises(BatcherClosed):
        await batcher.encode(TextInput("too late"))
    scripted.gate.set()


async def test_random_cancels_leave_exact_answers_and_no_residue(
    vocabulary: Vocabulary, renderer: ChatRenderer
) -> None:
    """300 callers, a third of whom give up at different moments."""
    async with EncodeBatcher(vocabulary, renderer, max_batch_size=8) as batcher:
        texts = [f"text number {place} " * (1 + place % 7) for place in range(300)]
        tasks = [asyncio.create_task(batcher.encode(TextInput(text))) for text in texts]
        for place in range(0, 300, 3):
            if place % 2:
                await asyncio.sleep(0)
            tasks[place].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for text, result in zip(texts, results, strict=True):
            assert isinstance(result, asyncio.CancelledError) or (
                isinstance(result, Encoded) and result.token_ids == vocabulary.encode_texts([text])[0]
            )
        assert sum(isinstance(result, Encoded) for result in results) >= 200
        assert batcher.waiting == 0


async def test_chats_and_texts_mix_in_one_batch(vocabulary: Vocabulary, renderer: ChatRenderer) -> None:
    async with EncodeBatcher(vocabulary, renderer) as batcher:
        inputs: list[EncodeInput] = []
        for place in range(20):
            inputs += [TextInput(f"<|im_end|>{place}"), ChatInput([ChatMessage("user", f"<|im_end|>{place}")])]
        results = await batcher.encode_many(inputs)
        for item, result in zip(inputs, results, strict=True):
            if isinstance(item, TextInput):
                assert result.token_ids == vocabulary.encode_texts([item.text])[0]
            else:
                assert result.token_ids == vocabulary.encode_marked([renderer.render(item)])[0]
                assert result.token_ids[0] == 1
        assert max(result.batch_size for result in results) > 1


@pytest.mark.parametrize("text", ["hello world " * 170_000, "a" * 2_000_000], ids=["words", "one word"])
async def test_two_megabytes_do_not_freeze_the_loop_nor_small_callers(
    default_model_dir: Path, vocabulary: Vocabulary, text: str
) -> None:
    """While huge inputs are at work the loop turns, and small calls come back long before they do."""
    wide = Vocabulary.__new__(Vocabulary)
    wide.__dict__.update(vocabulary.__dict__, facts=replace(vocabulary.facts, max_input_bytes=4_000_000))
    async with EncodeBatcher(wide, ChatRenderer.load(default_model_dir, wide)) as batcher:
        huge: list[EncodeInput] = [TextInput(text), ChatInput([ChatMessage("user", text)])]
        tasks = [asyncio.create_task(batcher.encode(item)) for item in huge]
        lags_ns: list[int] = []
        small = 0
        while not all(task.done() for task in tasks):
            before_ns = time.monotonic_ns()
            await asyncio.sleep(0)
            lags_ns.append(time.monotonic_ns() - before_ns)
            if not all(task.done() for task in tasks):
                await batcher.encode(TextInput("hi"))
                small += 1
        results = await asyncio.gather(*tasks)
        assert min(len(result.token_ids) for result in results) > 100_000
        assert small >= 20
        lags_ns.sort()
        assert lags_ns[len(lags_ns) * 99 // 100] < 50_000_000
