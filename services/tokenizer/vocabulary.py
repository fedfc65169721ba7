"""A model's tokenizer: text to ids, ids to text, and the facts about its vocabulary.

The raw `tokenizers.Tokenizer` is set up once, in `load`, and never changed again: any number of threads may use
it. It reads no control token out of text. Those that a chat template writes reach it as stand-ins: one for each
control token, added beside it with the same stripping rules, containing a secret drawn at start-up so that no
caller can write one. A stand-in splits the text exactly as its control token would, and its id is turned
back into the control token's.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from services.tokenizer.inputs import UnknownTokenId

BYTES_PER_TOKEN = 16  # an input of more bytes than this for each token of the context is refused unread


class VocabularyError(ValueError):
    """The model's tokenizer files are missing, broken or do not fit its weights; names the file."""


@dataclass(frozen=True, slots=True)
class VocabularyFacts:
    """What others need to know of the vocabulary."""

    size: int  # ids are in [0, size)
    special_ids: tuple[int, ...]  # ascending
    bos_id: int | None
    eos_ids: tuple[int, ...]  # as the model's generation_config says; () if it names none
    context: int  # tokens: max_position_embeddings
    max_input_bytes: int


@dataclass(frozen=True, slots=True)
class AddedText:
    """A token that is recognised in text as a whole, before any other splitting."""

    text: str
    id: int
    stand_in: str  # what stands for it in marked text; "" if it is not a control token
    single_word: bool  # not recognised inside a word


class Vocabulary:
    """Immutable after construction; thread-safe. Use `load`."""

    def __init__(self, tokenizer: Tokenizer, facts: VocabularyFacts, named: dict[str, str]) -> None:
        self.facts = facts
        self.named_tokens = named  # "bos_token" → its text, and so on, for templates
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        secret = secrets.token_hex(16)
        stand_ins = {token_id: f"\ue000{secret}.{token_id}\ue001" for token_id, token in added if token.special}
        tokenizer.add_tokens(
            [
                AddedToken(stand_ins[token_id], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
                for token_id, token in added
                if token.special
            ]
        )
        self._tokenizer = tokenizer
        self._control_ids = {tokenizer.token_to_id(text): token_id for token_id, text in stand_ins.items()}
        self.added_texts = tuple(
            AddedText(token.content, token_id, stand_ins.get(token_id, ""), token.single_word)
            for token_id, token in added
            if token.special or not token.normalized
        )

    @classmethod
    def load(cls, directory: Path) -> "Vocabulary":
        """Read a model directory's tokenizer; takes some 100 ms.

        Raises:
            VocabularyError: naming the file and what was expected of it.
        """
        config = _read_json(directory / "config.json")
        texts = _read_json(directory / "tokenizer_config.json", optional=True)
        generation = _read_json(directory / "generation_config.json", optional=True)
        file = directory / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise VocabularyError(f"{file} is missing; expected the model's tokenizer.") from None
        except Exception as error:  # the library raises bare Exception for files that it cannot use
            raise VocabularyError(f"{file} cannot be read as a tokenizer ({error}).") from error
        size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        embeddings, context = config.get("vocab_size"), config.get("max_position_embeddings")
        if not isinstance(embeddings, int) or not isinstance(context, int) or context < 1:
            raise VocabularyError(f"{directory / 'config.json'} lacks vocab_size or max_position_embeddings.")
        if not 0 < size <= embeddings:
            raise VocabularyError(
                f"{file} has ids up to {size - 1}, but the model in {directory / 'config.json'} has {embeddings} "
                "embeddings (vocab_size); the tokenizer belongs to another model."
            )
        named = _named_tokens(texts, tokenizer, directory / "tokenizer_config.json")
        added = tokenizer.get_added_tokens_decoder()
        facts = VocabularyFacts(
            size=size,
            special_ids=tuple(sorted(token_id for token_id, token in added.items() if token.special)),
            bos_id=_bos_id(named, tokenizer, config),
            eos_ids=_eos_ids(named, tokenizer, config, generation),
            context=context,
            max_input_bytes=BYTES_PER_TOKEN * context,
        )
        return cls(tokenizer, facts, named)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode callers' texts; the post-processor adds what it adds. Releases the GIL."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
        return [encoding.ids for encoding in encodings]

    def encode_marked(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode rendered chats whose control tokens are stand-ins; nothing is added. Releases the GIL."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        size, control_ids = self.facts.size, self._control_ids
        return [
            [token_id if token_id < size else control_ids.get(token_id, token_id) for token_id in encoding.ids]
            for encoding in encodings
        ]

    def decode(self, token_ids: Sequence[int], include_special_tokens: bool = False) -> str:
        """Return the text of ids; bytes that are no character are U+FFFD.

        Raises:
            UnknownTokenId: an id is outside [0, size).
        """
        for place, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.facts.size:
                raise UnknownTokenId(
                    f"token id {token_id} is outside the vocabulary [0, {self.facts.size})",
                    field=f"token_ids[{place}]",
                )
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not include_special_tokens))


def _named_tokens(texts: dict[str, Any], tokenizer: Tokenizer, file: Path) -> dict[str, str]:
    """Return bos_token, eos_token, unk_token and pad_token as far as tokenizer_config.json names them."""
    named = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = texts.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if value is None:
            continue
        if not isinstance(value, str) or tokenizer.token_to_id(value) is None:
            raise VocabularyError(f"{file} names {key} {value!r}, which the vocabulary does not hold.")
        named[key] = value
    return named


def _bos_id(named: dict[str, str], tokenizer: Tokenizer, config: dict[str, Any]) -> int | None:
    if "bos_token" in named:
        return tokenizer.token_to_id(named["bos_token"])
    value = config.get("bos_token_id")
    return value if isinstance(value, int) else None


def _eos_ids(
    named: dict[str, str], tokenizer: Tokenizer, config: dict[str, Any], generation: dict[str, Any]
) -> tuple[int, ...]:
    for source in (generation, config):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if ids and all(isinstance(token_id, int) for token_id in ids):
            return tuple(ids)
    token_id = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return () if token_id is None else (token_id,)


def _read_json(file: Path, optional: bool = False) -> dict[str, Any]:
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise VocabularyError(f"{file} is missing; expected a Hugging Face style model directory.") from None
    except (OSError, ValueError) as error:
        raise VocabularyError(f"{file} cannot be read as JSON ({error}).") from error
    if not isinstance(loaded, dict):
        raise VocabularyError(f"{file} holds a JSON {type(loaded).__name__}; expected an object.")
    return loaded
