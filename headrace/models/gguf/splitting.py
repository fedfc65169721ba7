"""How byte-level tokenizers split text into words before merging, by the name that GGUF gives each way.

The patterns are facts of the published tokenizers (tokenizer.json of each family); knows nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST
)

Splitter = Callable[[], pre_tokenizers.PreTokenizer]


def _by(pattern: str) -> Splitter:
    def make() -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return make


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


SPLITTERS: dict[str, Splitter] = {
    "llama-bpe": _by(_LLAMA3),
    "llama-v3": _by(_LLAMA3),
    "llama3": _by(_LLAMA3),
    "smaug-bpe": _by(_LLAMA3),
    "qwen2": _by(_QWEN2),
    "deepseek-r1-qwen": _by(_QWEN2),
    "tekken": _by(_TEKKEN),
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "gpt-2": _gpt2,
}
IGNORES_MERGES = frozenset({"llama-bpe", "llama-v3", "llama3", "tekken"})  # a word that is a token stays whole
ADDS_BOS = frozenset({"llama-bpe", "llama-v3", "llama3", "tekken"})  # where the file does not say
NORMALIZES = frozenset({"qwen2", "deepseek-r1-qwen"})  # Unicode NFC
