"""The stream with delays."""

from tests.pipeline.delayed import run

run("stream")
