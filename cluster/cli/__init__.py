"""The command line, `graphpool`: nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the console script."""
    # gRPC reads these when it is imported. Its fork handlers hang processes that Ray starts, and what it logs of failed
    # connections and ports is said better by the errors themselves.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from cluster.cli.app import app

        app(prog_name="graphpool")
    except KeyboardInterrupt:
        # Pressed while the command was still being imported.
        sys.exit(130)
