"""What holds for every test process."""

from __future__ import annotations

import os

# Read by gRPC when it is imported, and any test may import it before one starts Ray: its fork handlers hang Ray's daemons.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
