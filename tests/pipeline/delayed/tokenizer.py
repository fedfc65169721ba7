"""The tokenizer with delays."""

from tests.pipeline.delayed import run

run("tokenizer")
