"""Small model directories with a tokenizer of chosen control tokens; bytes are the vocabulary."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from services.tokenizer.chat import ChatRenderer
from services.tokenizer.inputs import ChatInput, ChatMessage
from services.tokenizer.template import ChatTemplate
from services.tokenizer.vocabulary import Vocabulary


def write_tokenizer(
    directory: Path,
    control: Sequence[str | AddedToken] = ("<s>", "</s>"),
    added: Sequence[str] = (),
    template: str | None = None,
    bos: str | None = "<s>",
    adds_bos: bool = False,
    **config: Any,
) -> Path:
    """Byte-level letters and pairs of them, `control` and `added` tokens after that."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("h", "i"), ("Ġ", "h"), ("Ċ", "h"), ("x", "y")]
    tokens = [*alphabet, *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) if isinstance(t, str) else t for t in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    if adds_bos and bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    facts = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096, "eos_token_id": 0}
    (directory / "config.json").write_text(json.dumps(facts | config))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": "</s>"} if bos else {}))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def make_sentencepiece(directory: Path) -> None:
    """Turn a directory's tokenizer into one in the manner of Llama 2: "▁" for spaces, one in front of every text."""
    old = Tokenizer.from_file(str(directory / "tokenizer.json"))
    merges = [("▁", "h"), ("h", "i"), ("▁h", "i"), ("▁", "▁")]
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *"▁hixy<|>", *("".join(merge) for merge in merges)]
    vocabulary = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token.content, normalized=False) for token in old.get_added_tokens_decoder().values()]
    )
    tokenizer.save(str(directory / "tokenizer.json"))


def encode_chat(directory: Path, *messages: tuple[str, str | None]) -> list[int]:
    """Ids of a chat through our own path."""
    vocabulary = Vocabulary.load(directory)
    renderer = ChatRenderer.load(directory, vocabulary)
    assert renderer is not None
    return vocabulary.encode_marked([renderer.render(chat(*messages))])[0]


def encode_whole(directory: Path, text: str) -> list[int]:
    """Ids of a text with control tokens read out of it: what the usual template path does after rendering."""
    return list(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


def chat(*messages: tuple[str, str | None]) -> ChatInput:
    return ChatInput([ChatMessage(role, content) for role, content in messages])


def template(source: str, **limits: Any) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, **limits)


STRICT = (  # in the manner of Mistral's
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
TRIMMING = (  # in the manner of Llama 3's
    "{% for message in messages %}{% set content = '<|head|>' + message['role'] + '<|tail|>\\n\\n' "
    "+ message['content'] | trim + '<|eot|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|tail|>\\n\\n' }}"
    "{% endif %}"
)
TRIMMING_CONTROL = ("<s>", "</s>", "<|head|>", "<|tail|>", "<|eot|>")
