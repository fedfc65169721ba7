"""Wiring of the tokenizer process: `python -m services.tokenizer`."""

from services.common import serve
from services.common.logs import Log
from services.common.telemetry import Telemetry
from services.tokenizer.service import TokenizerProcess
from services.tokenizer.settings import TokenizerSettings


def build(settings: TokenizerSettings, telemetry: Telemetry, log: Log) -> TokenizerProcess:
    """The process from its settings."""
    return TokenizerProcess(settings, telemetry, log)


if __name__ == "__main__":
    raise SystemExit(serve.main("tokenizer", TokenizerSettings, build))
