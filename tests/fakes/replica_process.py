"""A replica with a scripted engine, as a process of its own that tests may kill.

    python -m tests.fakes.replica_process --config '{"routers": ["127.0.0.1:50050"]}' --knobs '{"step_s": 0.002}'

Prints its address as the first line of standard output. Ends on SIGTERM, after a drain; exits 70 if its engine fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping

from cluster.config import ReplicaConfig, from_mapping
from cluster.replica.events import EventFanout
from cluster.replica.server import ReplicaServer
from tests.fakes.script_engine import ScriptEngine, ScriptKnobs, ScriptText
from worker.faults import Faults

ENGINE_FAILED = 70


class ReplicaProcess:
    """The handle of such a process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


async def spawn_replica(config: Mapping[str, object], knobs: Mapping[str, object] | None = None) -> ReplicaProcess:
    """Start one and wait until it listens."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fakes.replica_process"),
        *("--config", json.dumps(dict(config)), "--knobs", json.dumps(dict(knobs or {}))),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        address = (await process.stdout.readline()).decode().strip()
    assert address, f"the replica process exited with {await process.wait()}"
    return ReplicaProcess(process, address)


@contextlib.asynccontextmanager
async def replica_process(
    config: Mapping[str, object], knobs: Mapping[str, object] | None = None
) -> AsyncIterator[ReplicaProcess]:
    """One for the length of a block."""
    replica = await spawn_replica(config, knobs)
    try:
        yield replica
    finally:
        await replica.kill()


async def serve(config: ReplicaConfig, knobs: ScriptKnobs) -> None:
    events = EventFanout()
    engine = ScriptEngine(events, knobs, faults=Faults())
    server = ReplicaServer(
        config,
        engine,
        ScriptText(),
        events=events,
        on_failure=lambda _: os._exit(ENGINE_FAILED),
        faults=engine.faults,
        gpu=knobs.gpu,
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await server.start()
    print(server.address, flush=True)
    await stop.wait()
    await server.drain(10)
    await server.stop()
    engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="{}", help="ReplicaConfig as JSON")
    parser.add_argument("--knobs", default="{}", help="ScriptKnobs as JSON")
    arguments = parser.parse_args()
    config = from_mapping(ReplicaConfig, json.loads(arguments.config))
    asyncio.run(serve(config, ScriptKnobs(**json.loads(arguments.knobs))))


if __name__ == "__main__":
    main()
