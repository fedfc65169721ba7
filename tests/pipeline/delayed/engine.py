"""The engine with delays."""

from tests.pipeline.delayed import run

run("engine")
