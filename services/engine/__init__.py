"""The engine: token ids in, token ids out. ``Engine`` and ``EngineConfig`` are usable without any server.

They are imported on first use, so that the domain modules can be imported without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.engine.engine import Engine, EngineConfig

__all__ = ["Engine", "EngineConfig"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from services.engine import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
