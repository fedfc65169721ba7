"""Wiring of the engine process: `python -m services.engine`."""

from services.common import serve
from services.common.logs import Log
from services.common.telemetry import Telemetry
from services.engine.service import EngineProcess
from services.engine.settings import EngineProcessSettings


def build(settings: EngineProcessSettings, telemetry: Telemetry, log: Log) -> EngineProcess:
    """The process from its settings."""
    return EngineProcess(settings, telemetry, log)


if __name__ == "__main__":
    raise SystemExit(serve.main("engine", EngineProcessSettings, build))
