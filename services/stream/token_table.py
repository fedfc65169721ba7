"""What each token id is worth as text, worked out once from a tokenizer's decoder.

Read-only after it is built and shared by every detokenizer. Knows no request.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Tokenizer

# "<0xE2>"; the library's number parser also takes a sign, so "<0x+5>" is byte 5 to it and to us
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


@dataclass(frozen=True, slots=True)
class TokenTable:
    """One entry an id. Which fields are filled depends on `kind`.

    `kind` "bytes": every token is bytes. "pieces": every token is text or one byte. "other": the decoder does
    something that one token alone does not show.
    """

    kind: Literal["bytes", "pieces", "other"]
    bytes_of: tuple[bytes, ...] = ()  # id → bytes; b"" for special and unused ids
    pieces: tuple[str | int | None, ...] = ()  # id → text, or a byte's value, or None for special and unused
    first_pieces: tuple[str | int | None, ...] = ()  # the same for the first token of a text
    strip_start: int = 0  # leading `strip_content` characters that the whole text loses, at most
    strip_content: str = " "

    @staticmethod
    def of(tokenizer: Tokenizer) -> "TokenTable":
        """Build the table of a tokenizer; special tokens have no text, as in `decode`."""
        steps = _decoder_steps(tokenizer)
        if [step["type"] for step in steps] == ["ByteLevel"]:
            characters = {character: byte for byte, character in byte_level_alphabet().items()}
            return TokenTable("bytes", bytes_of=tuple(_bytes(token, characters) for token in _tokens(tokenizer)))
        return _piece_table(tokenizer, steps) or TokenTable("other")


def byte_level_alphabet() -> dict[int, str]:
    """Return byte → the printable character that stands for it in a byte-level vocabulary.

    Printable Latin-1 stands for itself; the other bytes, in order, for the characters from U+0100 on
    (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.2).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    stands_for = {byte: chr(0x100 + place) for place, byte in enumerate(others)}
    return {byte: stands_for.get(byte, chr(byte)) for byte in range(256)}


def _bytes(token: str | None, characters: dict[str, int]) -> bytes:
    """Return a byte-level token's bytes; a token with any other character in it is its own UTF-8."""
    if token is None:
        return b""
    try:
        return bytes(characters[character] for character in token)
    except KeyError:
        return token.encode()


def _tokens(tokenizer: Tokenizer) -> list[str | None]:
    """Return id → token; None where the id is unused or special."""
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    by_id: dict[int, str] = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    by_id |= {token_id: token.content for token_id, token in added.items()}
    tokens: list[str | None] = [None] * (max(by_id, default=-1) + 1)
    for token_id, token in by_id.items():
        tokens[token_id] = None if token in special else token
    return tokens


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = json.loads(tokenizer.to_str()).get("decoder")
    if decoder is None:
        return [{"type": "none"}]
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _piece_table(tokenizer: Tokenizer, steps: list[dict[str, Any]]) -> TokenTable | None:
    """Understand (Replace | Metaspace)* ByteFallback? Fuse? Strip?; anything else is None."""
    order = "".join(
        {"Replace": "r", "Metaspace": "m", "ByteFallback": "b", "Fuse": "f", "Strip": "s"}.get(step["type"], "?")
        for step in steps
    )
    strip = steps[-1] if order.endswith("s") else None
    replaced = [step["pattern"].get("String") for step in steps if step["type"] == "Replace"]
    if not re.fullmatch(r"r*m?b?(fs?)?", order) or None in replaced or (strip and strip["stop"]):
        return None
    by_byte = "b" in order
    pieces: list[str | int | None] = []
    first_pieces: list[str | int | None] = []
    for token in _tokens(tokenizer):
        pieces.append(_piece(token, steps, by_byte, first=False))
        first_pieces.append(_piece(token, steps, by_byte, first=True))
    return TokenTable(
        "pieces",
        pieces=tuple(pieces),
        first_pieces=tuple(first_pieces),
        strip_start=strip["start"] if strip else 0,
        strip_content=strip["content"] if strip else " ",
    )


def _piece(token: str | None, steps: list[dict[str, Any]], by_byte: bool, first: bool) -> str | int | None:
    if token is None:
        return None
    for step in steps:
        if step["type"] == "Replace":
            token = token.replace(step["pattern"]["String"], step["content"])
        elif step["type"] == "Metaspace":
            leads = first and step["prepend_scheme"] != "never"
            token = token.replace(step["replacement"], "" if leads else " ")
    if by_byte and (match := _BYTE_TOKEN.fullmatch(token)):
        return int(match[1], 16)
    return token
