"""Headrace: LLM inference over gRPC, for backend services.

The names below are imported when they are first used, so that `headrace.errors` alone does not load grpc.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.answers import Answer, Choice, Delta, FinishReason
    from headrace.async_stream import AsyncStream
    from headrace.client import AsyncClient
    from headrace.errors import HeadraceError
    from headrace.sync_client import Client
    from headrace.sync_stream import Stream

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Client",
    "Delta",
    "FinishReason",
    "HeadraceError",
    "Stream",
]

_HOMES = {
    "Answer": "answers",
    "AsyncClient": "client",
    "AsyncStream": "async_stream",
    "Choice": "answers",
    "Client": "sync_client",
    "Delta": "answers",
    "FinishReason": "answers",
    "HeadraceError": "errors",
    "Stream": "sync_stream",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(import_module(f"headrace.{_HOMES[name]}"), name)
