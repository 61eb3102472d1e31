"""A router as a process of its own that tests may kill.

    python -m tests.fakes.router_process --config '{"listen": "127.0.0.1:0", "silence_timeout_s": 2}'

Prints its address as the first line of standard output. Ends on SIGTERM, after a drain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Mapping

from cluster.cli.logs import log_to_stderr
from cluster.config import RouterConfig, from_mapping
from cluster.heap import settle_heap
from cluster.router.server import RouterServer
from tests.fakes.replica_process import ReplicaProcess


class RouterProcess(ReplicaProcess):
    """The handle of such a process."""


async def spawn_router(
    config: Mapping[str, object],
    *,
    prefix: tuple[str, ...] = (),
    stderr: int | None = None,
    log_level: str = "WARNING",
) -> RouterProcess:
    """Start one and wait until it listens; `prefix` is a command that starts it, such as one that sets limits."""
    process = await asyncio.create_subprocess_exec(
        *prefix,
        *(sys.executable, "-m", "tests.fakes.router_process", "--config", json.dumps(dict(config))),
        *("--log-level", log_level),
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        address = (await process.stdout.readline()).decode().strip()
    assert address, f"the router process exited with {await process.wait()}"
    return RouterProcess(process, address)


async def serve(config: RouterConfig) -> None:
    server = RouterServer(config)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await server.start()
    settle_heap()
    print(server.address, flush=True)
    await stop.wait()
    await server.drain(10)
    await server.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="{}", help="RouterConfig as JSON")
    parser.add_argument("--log-level", default="WARNING")
    arguments = parser.parse_args()
    log_to_stderr(logging.getLevelName(arguments.log_level))
    values = {"listen": "127.0.0.1:0", **json.loads(arguments.config)}
    asyncio.run(serve(from_mapping(RouterConfig, values)))


if __name__ == "__main__":
    main()
