"""Wiring of the gateway: `python -m services.gateway`."""

from services.common import serve
from services.common.logs import Log
from services.common.telemetry import Telemetry
from services.gateway.service import GatewayProcess
from services.gateway.settings import GatewaySettings


def build(settings: GatewaySettings, telemetry: Telemetry, log: Log) -> GatewayProcess:
    """The process from its settings."""
    return GatewayProcess(settings, telemetry, log)


if __name__ == "__main__":
    raise SystemExit(serve.main("gateway", GatewaySettings, build))
