"""The gateway with delays."""

from tests.pipeline.delayed import run

run("gateway")
