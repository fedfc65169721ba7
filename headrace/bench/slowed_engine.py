"""The engine process with an engine whose steps take longer than they need: a slowdown put in on purpose.

`python -m headrace.bench.slowed_engine` stands in for `python -m services.engine`, all of it real;
HEADRACE_BENCH_SLOWDOWN says by what share of its time a step is longer. Imports the services when it is used; the
published package does not have them.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.engine.outputs import StepOutput

SLOWDOWN_VARIABLE = "HEADRACE_BENCH_SLOWDOWN"


def main() -> int:
    """Runs the engine process; returns its exit code."""
    from services.common import serve
    from services.engine.config import EngineConfig
    from services.engine.engine import Engine
    from services.engine.service import EngineProcess
    from services.engine.settings import EngineProcessSettings

    share = float(os.environ.get(SLOWDOWN_VARIABLE, "0"))

    class SlowedEngine(Engine):
        def step(self) -> StepOutput:
            begun = time.monotonic()
            output = super().step()
            time.sleep(share * (time.monotonic() - begun))
            return output

    class SlowedEngineProcess(EngineProcess):
        def _load(self, directory: Path) -> Any:
            engine = SlowedEngine.load(EngineConfig(model_dir=directory, **asdict(self._settings.engine)))
            engine.warm_up()
            return engine

    return serve.main("engine", EngineProcessSettings, SlowedEngineProcess)


if __name__ == "__main__":
    raise SystemExit(main())
