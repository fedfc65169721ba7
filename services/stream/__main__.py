"""Wiring of the stream process: `python -m services.stream`."""

from services.common import serve
from services.common.logs import Log
from services.common.telemetry import Telemetry
from services.stream.service import StreamProcess
from services.stream.settings import StreamSettings


def build(settings: StreamSettings, telemetry: Telemetry, log: Log) -> StreamProcess:
    """The process from its settings."""
    return StreamProcess(settings, telemetry, log)


if __name__ == "__main__":
    raise SystemExit(serve.main("stream", StreamSettings, build))
