"""What can be encoded, and what can be wrong with it.

    InputError(ValueError)      the caller's doing; `field` says where
    ├── InputTooLarge           more bytes than the context could ever hold; refused before any work
    ├── TemplateError           the chat template refused or failed; its own message
    └── UnknownTokenId          an id outside the vocabulary

Knows neither tokenizer nor template.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ROLES = ("system", "user", "assistant", "tool")


class InputError(ValueError):
    """An input that cannot be encoded. Never holds the input's text.

    Attributes:
        field: the path of what is at fault within the input, such as "messages[1].role"; "" is all of it.
        index: which of the inputs of one call.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.index = 0


class InputTooLarge(InputError):
    """More bytes than `max_input_bytes`."""


class TemplateError(InputError):
    """The chat template raised; the message is its own where it calls `raise_exception`."""


class UnknownTokenId(InputError):
    """A token id below 0 or not below the vocabulary's size."""


@dataclass(frozen=True, slots=True)
class TextInput:
    """Raw text. Control tokens in it stay text; the tokenizer's post-processor may add BOS."""

    text: str


@dataclass(frozen=True, slots=True)
class TextPart:
    """A part of a message that is text."""

    text: str


@dataclass(frozen=True, slots=True)
class OtherPart:
    """A part of a message that is not text, such as an image: refused by name."""

    kind: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn; no content is the same as empty content."""

    role: str  # one of ROLES
    content: str | Sequence[TextPart | OtherPart] | None = None


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A conversation, rendered by the model's template."""

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool = True  # end with the opening of the assistant's turn


EncodeInput = TextInput | ChatInput


@dataclass(frozen=True, slots=True)
class Turn:
    """A checked message: a known role and plain text."""

    role: str
    text: str


def check_chat(chat: ChatInput) -> list[Turn]:
    """Return a chat's turns with their parts joined.

    Raises:
        InputError: no messages, an unknown role, or a part that is not text.
    """
    if not chat.messages:
        raise InputError("a chat needs at least one message", field="messages")
    turns = []
    for place, message in enumerate(chat.messages):
        if message.role not in ROLES:
            known = ", ".join(ROLES)
            raise InputError(f"a message's role must be one of {known}", field=f"messages[{place}].role")
        turns.append(Turn(message.role, _text_of(message, place)))
    return turns


def input_texts(item: EncodeInput) -> list[str]:
    """Return every caller-written text of an input, unchecked otherwise."""
    if isinstance(item, TextInput):
        return [item.text]
    texts: list[str] = []
    for message in item.messages:
        if isinstance(message.content, str):
            texts.append(message.content)
        elif message.content is not None:
            texts += [part.text for part in message.content if isinstance(part, TextPart)]
    return texts


def check_size(item: EncodeInput, max_bytes: int) -> int:
    """Return the input's size in UTF-8 bytes.

    Raises:
        InputTooLarge: it is larger than `max_bytes`.
        InputError: a text holds surrogates, which are no characters and have no UTF-8.
    """
    size = 0
    for text in input_texts(item):
        size += len(text)  # a lower bound, so that an absurd text is not even copied
        if size <= max_bytes and not text.isascii():
            try:
                size += len(text.encode()) - len(text)
            except UnicodeEncodeError:
                raise InputError("the text holds surrogates, which cannot be encoded") from None
    if size > max_bytes:
        raise InputTooLarge(f"the input has at least {size} bytes; the limit is {max_bytes}")
    return size


def _text_of(message: ChatMessage, place: int) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    texts = []
    for number, part in enumerate(message.content):
        if not isinstance(part, TextPart):
            raise InputError(
                f"a part of kind {part.kind!r} cannot be served; only text can",
                field=f"messages[{place}].parts[{number}]",
            )
        texts.append(part.text)
    return "".join(texts)
