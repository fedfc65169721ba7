"""Renders chats so that only the template writes control tokens.

The idea: render twice. In the second rendering every punctuation character of the callers' texts that occurs
in any control token is replaced by a surrogate, one for one; a surrogate occurs in no valid text, so nobody can
forge one. If turning the surrogates back gives the first rendering, character for character, the template did
not look at what was replaced, and the control tokens in the second rendering are exactly those that the template wrote,
at the same places. These become stand-ins (see `vocabulary.py`); all others stay text. Lengths and blanks
are the same in both, so trimming and slicing do not disturb this.

A template that does look (say, for a `</think>` in an answer) gets a third rendering, in which only whole control
tokens are replaced; it must agree with the first, and hold the template's control tokens in the same order
as the second. Where even that fails, the input is refused.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from services.tokenizer.inputs import ChatInput, TemplateError, Turn, check_chat
from services.tokenizer.template import ChatTemplate
from services.tokenizer.vocabulary import AddedText, Vocabulary

_FIRST_SURROGATE = 0xDC00
_AMBIGUOUS = (
    "the chat template changes its output with control tokens in a message's text, so text and control tokens "
    "cannot be told apart"
)

Span = tuple[int, int, AddedText]  # start, end, what is there


class ChatRenderer:
    """Thread-safe; blocks, so call it off the event loop."""

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate) -> None:
        self._template = template
        self._added = vocabulary.added_texts
        self._control = sorted((added.text for added in self._added if added.stand_in), key=len, reverse=True)
        characters = sorted({character for text in self._control for character in _marking(text)})
        self._to_surrogate = {character: chr(_FIRST_SURROGATE + place) for place, character in enumerate(characters)}

    @classmethod
    def load(cls, directory: Path, vocabulary: Vocabulary) -> "ChatRenderer | None":
        """Read the template of a model's directory; None if the model has none.

        Raises:
            ValueError: the template is not valid; the message names the file.
        """
        # a template copies a text a few times on its way out, each copy counts
        characters = 1_000_000 + 32 * vocabulary.facts.max_input_bytes
        template = ChatTemplate.load(directory, vocabulary.named_tokens, max_characters=characters)
        return None if template is None else cls(vocabulary, template)

    def render(self, chat: ChatInput) -> str:
        """Return the rendered chat for `Vocabulary.encode_marked`.

        Raises:
            InputError: the chat is not acceptable, or the template refuses it (TemplateError).
        """
        turns = check_chat(chat)
        text = self._template.render(turns, chat.add_generation_prompt)
        if not any(character in turn.text for turn in turns for character in self._to_surrogate):
            return _with_stand_ins(text, self._spans(text))
        neutral = self._render([self._neutral(turn.text) for turn in turns], turns, chat)
        own = self._spans(neutral)
        if self._restored(neutral) != text:
            guarded = self._render([self._defused(turn.text) for turn in turns], turns, chat)
            order = [span[2].id for span in own]
            own = self._spans(guarded)
            if self._restored(guarded) != text or [span[2].id for span in own] != order:
                raise TemplateError(_AMBIGUOUS, field="messages")
        return _with_stand_ins(text, own)

    def _render(self, texts: Sequence[str], turns: Sequence[Turn], chat: ChatInput) -> str:
        changed = [replace(turn, text=text) for turn, text in zip(turns, texts, strict=True)]
        return self._template.render(changed, chat.add_generation_prompt)

    def _neutral(self, text: str) -> str:
        """Replace every character that could be part of a control token's punctuation."""
        for character, surrogate in self._to_surrogate.items():
            text = text.replace(character, surrogate)
        return text

    def _defused(self, text: str) -> str:
        """Replace them inside whole control tokens only."""
        for control in self._control:
            if control in text:
                text = text.replace(control, self._neutral(control))
        return text

    def _restored(self, text: str) -> str:
        for character, surrogate in self._to_surrogate.items():
            text = text.replace(surrogate, character)
        return text

    def _spans(self, text: str) -> list[Span]:
        """Find control tokens as the tokenizer does: leftmost, then longest, added tokens competing."""
        found: list[Span] = []
        for added in self._added:
            start = text.find(added.text)
            while start >= 0:
                end = start + len(added.text)
                if not (added.single_word and _inside_word(text, start, end)):
                    found.append((start, end, added))
                start = text.find(added.text, start + 1)
        found.sort(key=lambda span: (span[0], -span[1]))
        spans, free_from = [], 0
        for span in found:
            if span[0] >= free_from:
                free_from = span[1]
                spans.append(span)
        return [span for span in spans if span[2].stand_in]


def _with_stand_ins(text: str, spans: Sequence[Span]) -> str:
    pieces, copied = [], 0
    for start, end, added in spans:
        pieces += [text[copied:start], added.stand_in]
        copied = end
    return "".join([*pieces, text[copied:]])


def _marking(control: str) -> set[str]:
    """Return the characters of a control token that are replaced: its punctuation, else its first character."""
    punctuation = {character for character in control if unicodedata.category(character)[0] in "PSC"}
    return punctuation or set(control[:1])


def _inside_word(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start], text[end : end + 1]
    return any(character.isalnum() or character == "_" for character in before + after)
