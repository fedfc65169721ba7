"""What the front door costs and holds, measured on real processes: `make bench-gateway`. CI does not run it."""

import services.engine  # noqa: F401 - sets what must be set before torch is imported
