"""The command line, `graphpool`: nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os


def main() -> None:
    """Entry point of the console script."""
    # gRPC reads it when it is imported; a live channel in a process that forks can crash the child.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from cluster.cli.app import app

    app()
