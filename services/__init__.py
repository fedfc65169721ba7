"""The four processes and what they share."""

import os

# gRPC's own notes about peers that come and go; ours say it once, and better. Set before grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
