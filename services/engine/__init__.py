"""The engine: token ids in, token ids out. ``Engine`` and ``EngineConfig`` are usable without any server.

They are imported on first use, so that the domain modules can be imported without torch.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.engine.engine import Engine, EngineConfig

__all__ = ["Engine", "EngineConfig"]

# A tensor thread that has run out of work spins before it sleeps. The default, milliseconds, starves whoever
# shares the cores: beside one busy process a step was up to 8 times slower. A few microseconds cost nothing
# alone. Must be set before torch is imported; an operator's own choice is left as it is.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# oneDNN keeps half a megabyte of code for each shape of a product that it has seen, and torch keeps it again. Each
# number of rows is a shape: after a while that is more than a gigabyte. This many are enough for what recurs.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "512")


def __getattr__(name: str) -> Any:
    if name in __all__:
        from services.engine import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
