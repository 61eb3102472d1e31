"""The process that hosts one engine: it ends with its engine, and drains before it closes. Engines are scripted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster import replica_process
from cluster.client import AsyncGraphpoolClient
from cluster.config import ReplicaConfig
from cluster.replica.events import EventFanout
from cluster.replica_process import ENGINE_FAILED, ReplicaProcess
from tests.fakes.script_engine import ScriptEngine, ScriptKnobs, ScriptText
from worker.config import WorkerConfig
from worker.errors import EngineDead

ROOT = Path(__file__).resolve().parents[3]

DOOMED = """
import asyncio
from cluster import replica_process
from cluster.client import AsyncGraphpoolClient
from cluster.config import ReplicaConfig
from tests.fakes.script_engine import ScriptKnobs
from tests.unit.cluster.test_replica_process import scripted_build
from worker.config import WorkerConfig

async def main():
    replica_process._build = scripted_build(ScriptKnobs(crash_after_steps=3))
    process = await replica_process.ReplicaProcess.open(WorkerConfig(), ReplicaConfig())
    async with AsyncGraphpoolClient(process.server.address) as client:
        try:
            async for _ in client.stream([5], max_tokens=50):
                pass
        except Exception as error:
            print(type(error).__name__, flush=True)
        await asyncio.sleep(30)

asyncio.run(main())
"""


@dataclass(slots=True)
class ScriptedBuild:
    """What `worker.build.build_engine` returns, with a scripted engine."""

    engine: ScriptEngine
    text: ScriptText = field(default_factory=ScriptText)
    generation_defaults: dict[str, float] = field(default_factory=dict)


def scripted_build(knobs: ScriptKnobs) -> Callable[..., ScriptedBuild]:
    def build(worker: WorkerConfig, events: EventFanout, *rest: object) -> ScriptedBuild:
        return ScriptedBuild(ScriptEngine(events, knobs))

    return build


def test_a_failed_engine_ends_the_process_after_its_clients_were_told() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DOOMED], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "Unavailable\n"
    assert done.returncode == ENGINE_FAILED


async def test_closing_lets_the_running_answer_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_process, "_build", scripted_build(ScriptKnobs(step_s=0.005)))
    process = await ReplicaProcess.open(WorkerConfig(), ReplicaConfig())
    async with AsyncGraphpoolClient(process.server.address) as client:
        stream = client.stream([5], max_tokens=80, temperature=0.0)
        num_tokens = len((await anext(stream)).token_ids)
        await process.close(grace_s=10)
        async for piece in stream:
            num_tokens += len(piece.token_ids)
    assert num_tokens == 80
    with pytest.raises(EngineDead):
        process.engine.check()


async def test_an_engine_without_a_port_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[ScriptedBuild] = []

    def build(worker: WorkerConfig, events: EventFanout, *rest: object) -> ScriptedBuild:
        built.append(scripted_build(ScriptKnobs())(worker, events, *rest))
        return built[-1]

    monkeypatch.setattr(replica_process, "_build", build)
    first = await ReplicaProcess.open(WorkerConfig(), ReplicaConfig())
    with pytest.raises(OSError, match="cannot listen"):
        await ReplicaProcess.open(WorkerConfig(), ReplicaConfig(listen=first.server.address))
    with pytest.raises(EngineDead):
        built[-1].engine.submit(None)  # type: ignore[arg-type]
    await first.close(grace_s=1)
