"""Turns token ids into text as they come.

For every way of cutting the ids into pushes, the texts put together equal
`Tokenizer.decode(all ids, skip_special_tokens=True)`. Knows generated ids only, never the prompt's: like
`decode` of the answer alone, a SentencePiece tokenizer's rule for the first token (its leading space goes) applies
to the answer's first token.

Three ways of decoding, chosen once a tokenizer by `TokenTable`:

- byte-level BPE (SmolLM2, Llama 3, Qwen): a token is bytes, the text is their UTF-8. A character that is not
  complete waits, three bytes at most; bytes that cannot become one are U+FFFD at once.
- pieces with byte fallback (Llama 2, Mistral): a token is text, or one byte `<0x..>`. A run of byte tokens is
  text if the whole run is valid UTF-8, else one U+FFFD a byte: so a run waits until it ends, is invalid, or
  has grown to 32 bytes. (Beyond these, characters go out as they are complete, and a later invalid byte no
  longer changes them: the one place where `decode` would say something else.)
- anything else: the tokenizer itself decodes a window of recent tokens.
"""

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from services.stream.token_table import TokenTable

_RUN_BYTES = 32
_WINDOW_TOKENS = 16
_PENDING_TOKENS = 4  # as many as a character has bytes
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """One answer's ids on their way to text. Not thread-safe; make one for each answer."""

    def push(self, token_ids: Sequence[int], /) -> str:
        """Take more ids; return the text that can no longer change. Unknown and special ids are no text."""

    def finish(self) -> str:
        """Return what still waits, an unfinished character as U+FFFD. Call once, at the end."""


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer; the tables are built once, here, and shared."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = TokenTable.of(tokenizer)

    @classmethod
    def load(cls, directory: Path) -> "DetokenizerFactory":
        """Read `tokenizer.json` of a model's directory; blocks for some 100 ms.

        Raises:
            ValueError: the file is missing or is no tokenizer; the message names it.
        """
        file = directory / "tokenizer.json"
        try:
            return cls(Tokenizer.from_str(file.read_text(encoding="utf-8")))
        except Exception as error:  # the library raises bare Exception for files that it cannot use
            raise ValueError(f"{file} cannot be read as a tokenizer ({error})") from error

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token's text, a control token's included; need not be whole characters."""
        table = self._table
        if table.kind == "bytes" and 0 <= token_id < len(table.bytes_of) and table.bytes_of[token_id]:
            return table.bytes_of[token_id]
        if table.kind == "pieces" and 0 <= token_id < len(table.pieces):
            piece = table.pieces[token_id]
            if piece is not None:
                return bytes([piece]) if isinstance(piece, int) else piece.encode()
        return (self._tokenizer.id_to_token(token_id) or "").encode()

    def new(self) -> Detokenizer:
        """Return a detokenizer for one answer."""
        if self._table.kind == "bytes":
            return ByteLevelDetokenizer(self._table)
        if self._table.kind == "pieces":
            return PieceDetokenizer(self._table)
        return WindowDetokenizer(self._tokenizer)


class ByteLevelDetokenizer:
    """Tokens are bytes. `bytes.decode(errors="replace")` replaces as Rust's `from_utf8_lossy` does."""

    __slots__ = ("_decode", "_tokens")

    def __init__(self, table: TokenTable) -> None:
        self._tokens = table.bytes_of
        self._decode = _utf8(errors="replace").decode

    def push(self, token_ids: Sequence[int], /) -> str:
        """Return the characters that are complete."""
        tokens, count = self._tokens, len(self._tokens)
        return self._decode(b"".join([tokens[token_id] for token_id in token_ids if 0 <= token_id < count]))

    def finish(self) -> str:
        """Return what still waits."""
        return self._decode(b"", final=True)


class PieceDetokenizer:
    """Tokens are text, or one byte each where the vocabulary has no piece for a character."""

    __slots__ = ("_at_start", "_characters", "_decode", "_run_bytes", "_strip_left", "_table", "_valid")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._at_start = True  # no token has become text yet
        self._strip_left = table.strip_start  # leading characters of the whole text still to drop, at most
        self._start_run()

    def push(self, token_ids: Sequence[int], /) -> str:
        """Return the text outside runs of bytes, and of runs that are decided."""
        out: list[str] = []
        for token_id in token_ids:
            pieces = self._table.first_pieces if self._at_start else self._table.pieces
            piece = pieces[token_id] if 0 <= token_id < len(pieces) else None
            if piece is None:
                continue
            self._at_start = False
            if isinstance(piece, int):
                self._push_byte(piece, out)
            else:
                self._end_run(out)
                out.append(piece)
        return self._strip("".join(out))

    def finish(self) -> str:
        """Return what still waits."""
        out: list[str] = []
        self._end_run(out)
        return self._strip("".join(out))

    def _start_run(self) -> None:
        self._decode = _utf8(errors="strict").decode
        self._characters: list[str] = []  # complete ones of the current run of byte tokens, waiting
        self._run_bytes = 0  # of the run, not yet sent out as text
        self._valid = True  # whether the run may still be text

    def _push_byte(self, byte: int, out: list[str]) -> None:
        if not self._valid:
            out.append(_REPLACEMENT)
            return
        self._run_bytes += 1
        try:
            self._characters.append(self._decode(bytes((byte,))))
        except UnicodeDecodeError:
            self._valid = False
            out.append(_REPLACEMENT * self._run_bytes)
            return
        if self._run_bytes >= _RUN_BYTES and self._characters[-1]:
            out.append("".join(self._characters))
            self._characters.clear()
            self._run_bytes = 0

    def _end_run(self, out: list[str]) -> None:
        if not self._run_bytes:
            if not self._valid:
                self._start_run()
            return
        if self._valid:
            try:
                self._decode(b"", final=True)
                out.append("".join(self._characters))
            except UnicodeDecodeError:
                out.append(_REPLACEMENT * self._run_bytes)
        self._start_run()

    def _strip(self, text: str) -> str:
        """Drop what is left to drop of the text's beginning."""
        while self._strip_left and text:
            if not text.startswith(self._table.strip_content):
                self._strip_left = 0
            else:
                self._strip_left -= 1
                text = text[1:]
        return text


class WindowDetokenizer:
    """Any other decoder: decodes a few recent tokens again and sends what is new.

    Bounded: at most `_WINDOW_TOKENS` of context and `_PENDING_TOKENS` waiting. Equal to `decode` for
    decoders that look no further than that; no model family we serve needs it.
    """

    __slots__ = ("_ids", "_sent", "_sent_ids", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # context and what waits
        self._sent_ids = 0  # of these, how many are context
        self._sent = ""  # the context's text

    def push(self, token_ids: Sequence[int], /) -> str:
        """Return what the new tokens added to the text."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """Return what still waits."""
        return self._tokenizer.decode(self._ids)[len(self._sent) :]

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        waiting = len(self._ids) - self._sent_ids
        if text.endswith(_REPLACEMENT) and waiting < _PENDING_TOKENS:
            return ""
        new = text[len(self._sent) :]
        self._ids = self._ids[-_WINDOW_TOKENS:]
        self._sent_ids = len(self._ids)
        self._sent = self._tokenizer.decode(self._ids)
        return new
