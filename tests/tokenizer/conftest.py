"""The default model's tokenizer and, as oracles, the raw library and transformers."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.tokenizer.chat import ChatRenderer
from services.tokenizer.vocabulary import Vocabulary


@pytest.fixture(scope="session")
def vocabulary(default_model_dir: Path) -> Vocabulary:
    return Vocabulary.load(default_model_dir)


@pytest.fixture(scope="session")
def renderer(default_model_dir: Path, vocabulary: Vocabulary) -> ChatRenderer:
    loaded = ChatRenderer.load(default_model_dir, vocabulary)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def parsing(default_model_dir: Path) -> Tokenizer:
    """The library as it comes: control tokens are read out of any text."""
    return Tokenizer.from_file(str(default_model_dir / "tokenizer.json"))
