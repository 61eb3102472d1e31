"""`python -m cluster.demo`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the demo; exit code 1 when anything it promises was not seen."""
    # Read by gRPC when it is imported; see cluster.private_ray.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from cluster.cli.running import run_until_stopped
    from cluster.demo.story import tell

    failures: list[str] = ["the demo was interrupted"]

    async def run() -> None:
        failures[:] = await tell()

    run_until_stopped(run)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
