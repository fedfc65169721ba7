"""Structured logs on standard error: a JSON object a line, or readable lines. Never a prompt, never a line a token."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any, cast

import structlog

from services.common.settings import setting

Log = structlog.stdlib.BoundLogger


@dataclass(frozen=True)
class LogSettings:
    """What is logged, and how it looks."""

    SECTION = "LOG"
    level: str = setting("info", "least severe level", choices=("debug", "info", "warning", "error"))
    format: str = setting("json", "json, or console for people", choices=("json", "console"))


def configure(service: str, settings: LogSettings) -> Log:
    """Sets this process up for logging and returns its logger, with the service's name bound."""
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    logging.basicConfig(stream=sys.stderr, level=max(level, logging.WARNING), format="%(name)s: %(message)s")
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if settings.format == "json"
        else structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso" if settings.format == "json" else "%H:%M:%S", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    return cast("Log", structlog.get_logger(service=service))
