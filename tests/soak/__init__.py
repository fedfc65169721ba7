"""Long runs that CI does not do: `make soak`."""

import services.engine  # noqa: F401 - sets what must be set before torch is imported
