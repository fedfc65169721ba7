"""A GGUF file's vocabulary as tokenizer.json, tokenizer_config.json and chat_template.jinja.

Two kinds: `gpt2`, byte-level BPE with merges and a named way of splitting text into words, and `llama`,
SentencePiece's BPE, whose merges follow from the pieces' scores. Knows nothing of weights.
Token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#ggml
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from headrace.models.gguf.file import GgufFile
from headrace.models.gguf.splitting import ADDS_BOS, IGNORES_MERGES, NORMALIZES, SPLITTERS

_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPACE = "\u2581"  # SentencePiece's stand-in for a space


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    types: list[int]

    @property
    def ids(self) -> dict[str, int]:
        return {token: place for place, token in enumerate(self.tokens)}

    def added(self) -> list[AddedToken]:
        """Tokens that are recognised in text as a whole, by id."""
        whole = (_UNKNOWN, _CONTROL, _USER_DEFINED)
        return [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in whole
        ]


def write_tokenizer(file: GgufFile, directory: Path, vocab_size: int) -> dict[str, Any]:
    """Write the tokenizer's files; return the ids that config.json and generation_config.json name.

    Raises:
        ImportFailed: metadata is missing or contradicts itself, or the kind of tokenizer is not supported.
    """
    vocabulary = _vocabulary(file, vocab_size)
    kind = file.text(_PREFIX + "model")
    if kind not in _BUILDERS:
        raise file.fail(f"has a tokenizer of kind {kind!r}; expected one of {', '.join(_BUILDERS)}.")
    ids = _named_ids(file, vocabulary)
    tokenizer = _BUILDERS[kind](file, vocabulary)
    added = vocabulary.added()
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.save(str(directory / "tokenizer.json"))
    texts = {f"{name}_token": vocabulary.tokens[ids[name]] for name in _NAMED if name in ids}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **texts}
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return _model_ids(ids)


def _vocabulary(file: GgufFile, vocab_size: int) -> _Vocabulary:
    tokens = file.items(_PREFIX + "tokens", str)
    types = file.items(_PREFIX + "token_type", int)
    if len(types) != len(tokens) or len(tokens) > vocab_size:
        raise file.fail(
            f"has {len(tokens)} tokens, {len(types)} token types and {vocab_size} embeddings; expected as many "
            "types as tokens and no fewer embeddings."
        )
    used = len(tokens)
    while used and types[used - 1] == _UNUSED:  # padding up to the embeddings
        used -= 1
    if len(set(tokens[:used])) != used:
        raise file.fail(f"has {used - len(set(tokens[:used]))} tokens twice in {_PREFIX}tokens; expected each once.")
    return _Vocabulary(tokens[:used], types[:used])


def _named_ids(file: GgufFile, vocabulary: _Vocabulary) -> dict[str, int]:
    """Ids of the tokens that have a part to play: bos, eos, unk, pad, eot, eom."""
    ids = {}
    for name, key in {**_NAMED, "eot": "eot", "eom": "eom"}.items():
        value = file.metadata.get(f"{_PREFIX}{key}_token_id")
        if value is None or (name == "pad" and value not in range(len(vocabulary.tokens))):
            continue
        if value not in range(len(vocabulary.tokens)):
            raise file.fail(
                f"has {_PREFIX}{key}_token_id = {value}; expected an id below {len(vocabulary.tokens)}, its tokens."
            )
        ids[name] = int(value)
    if "eos" not in ids:
        raise file.fail(f"lacks {_PREFIX}eos_token_id; expected the token that ends an answer.")
    return ids


def _model_ids(ids: dict[str, int]) -> dict[str, Any]:
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if name in ids))
    named = {f"{name}_token_id": ids[name] for name in ("bos", "pad") if name in ids}
    return {**named, "eos_token_id": ends[0] if len(ends) == 1 else ends}


def _byte_level(file: GgufFile, vocabulary: _Vocabulary) -> Tokenizer:
    """Byte-level BPE in the manner of GPT-2, Llama 3 and Qwen."""
    split = file.text(_PREFIX + "pre")
    if split not in SPLITTERS:
        raise file.fail(f"splits words by {split!r} ({_PREFIX}pre); expected one of {', '.join(SPLITTERS)}.")
    merges = [tuple(merge.split(" ")) for merge in file.items(_PREFIX + "merges", str)]
    tokenizer = _bpe(file, vocabulary, merges, ignore_merges=split in IGNORES_MERGES)
    if split in NORMALIZES:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = SPLITTERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _surround(file, vocabulary, adds_bos=split in ADDS_BOS)
    return tokenizer


def _sentencepiece(file: GgufFile, vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece's BPE in the manner of Llama 2 and Mistral."""
    scores = file.items(_PREFIX + "scores", float)
    if len(scores) < len(vocabulary.tokens):
        raise file.fail(f"has {len(scores)} scores for {len(vocabulary.tokens)} tokens; expected one a token.")
    unknown = next((t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _UNKNOWN), None)
    tokenizer = _bpe(
        file,
        vocabulary,
        _merges_from_scores(vocabulary, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=_BYTE in vocabulary.types,
    )
    prefixed = bool(file.metadata.get(_PREFIX + "add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    tokenizer.post_processor = _surround(file, vocabulary, adds_bos=True)
    return tokenizer


def _merges_from_scores(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the third's best score first.

    SentencePiece joins the pair whose result has the highest score (Kudo and Richardson, 2018), the leftmost of
    equals. Merges in that order do the same, the longer left piece before the shorter for one result.
    """
    pieces = {
        token: place
        for place, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind not in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
    }
    found = [
        (-scores[place], -cut, token[:cut], token[cut:])
        for token, place in pieces.items()
        if vocabulary.types[place] != _USER_DEFINED
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _bpe(file: GgufFile, vocabulary: _Vocabulary, merges: Sequence[Any], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocabulary.ids, list(merges), **options))
    except Exception as error:  # the library raises bare Exception
        first = str(error).splitlines()[0]
        raise file.fail(f"has merges that do not fit its tokens ({first}); expected pairs of them.") from error


def _surround(file: GgufFile, vocabulary: _Vocabulary, *, adds_bos: bool) -> processors.PostProcessor:
    """The post-processor that adds the first and the last token where the file says so."""
    ids = _named_ids(file, vocabulary)
    before = "bos" in ids and bool(file.metadata.get(_PREFIX + "add_bos_token", adds_bos))
    after = bool(file.metadata.get(_PREFIX + "add_eos_token", False))
    bos, eos = (vocabulary.tokens[ids[name]] if name in ids else "" for name in ("bos", "eos"))
    return processors.TemplateProcessing(
        single=[*([bos] if before else []), "$A", *([eos] if after else [])],
        special_tokens=[*([(bos, ids["bos"])] if before else []), *([(eos, ids["eos"])] if after else [])],
    )


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
