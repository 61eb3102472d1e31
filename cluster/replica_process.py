"""What a replica process holds: one engine and the server around it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from cluster.config import ReplicaConfig
from cluster.heap import growing_heap
from cluster.replica.events import EventFanout
from cluster.replica.flush import FlushPolicy
from cluster.replica.gpu import gpu_of
from cluster.replica.server import ReplicaServer
from cluster.replica.start_times import StartTimes
from cluster.security.core_dumps import refuse_core_dumps
from worker.config import WorkerConfig
from worker.context_ahead import has_driver, make_context_ahead
from worker.errors import WorkerError
from worker.faults import Faults
from worker.kernels.build_processes import start_build_processes
from worker.kernels.cache_key import hash_compiler_ahead
from worker.model.progress import Progress
from worker.service import EngineService

if TYPE_CHECKING:
    from worker.build import BuiltEngine

ENGINE_FAILED = 70
"""Exit code of a replica process whose engine ended or stalled: EX_SOFTWARE."""

log = logging.getLogger(__name__)


class ReplicaProcess:
    """An engine that runs and a server that takes requests for it."""

    def __init__(self, engine: EngineService, server: ReplicaServer) -> None:
        self.engine = engine
        self.server = server

    @classmethod
    async def open(
        cls,
        worker: WorkerConfig,
        config: ReplicaConfig,
        *,
        progress: Progress | None = None,
        times: StartTimes | None = None,
    ) -> ReplicaProcess:
        """Load the model, start the engine, serve it. torch is imported here and nowhere before.

        Raises ModelLoadError or ValueError for what cannot be served, OSError for a port that is taken. Once it is
        open, an engine that fails ends the whole process: nothing about a broken CUDA context can be mended in it.
        """
        refuse_core_dumps()
        with growing_heap():
            return await cls._open(worker, config, progress, times or StartTimes())

    @classmethod
    async def _open(
        cls, worker: WorkerConfig, config: ReplicaConfig, progress: Progress | None, times: StartTimes
    ) -> ReplicaProcess:
        events = EventFanout()
        faults = Faults() if config.enable_fault_injection else None
        pace = FlushPolicy.of(config)
        built = await asyncio.to_thread(_build, worker, events, progress, faults, pace.interval, times)
        server = ReplicaServer(
            config,
            built.engine,
            built.text,
            events=events,
            generation_defaults=built.generation_defaults,
            on_failure=end_process,
            faults=faults,
            flush=FlushPolicy.at_once(),  # the engine hands tokens out at that pace already
            times=times,
            gpu=gpu_of(built.engine.info.device),
        )
        try:
            await server.start()
        except BaseException:
            await asyncio.to_thread(built.engine.stop)
            raise
        return cls(built.engine, server)

    async def close(self, *, grace_s: float) -> None:
        """Take nothing new, let what runs go on for `grace_s` at most, then end."""
        await self.server.drain(grace_s)
        await self.server.stop()
        await asyncio.to_thread(self.engine.stop)


def _build(
    worker: WorkerConfig,
    events: EventFanout,
    progress: Progress | None,
    faults: Faults | None,
    hold_s: Callable[[int], float],
    times: StartTimes,
) -> BuiltEngine:
    compilers = None
    if worker.device != "cpu" and has_driver():
        make_context_ahead()
        compilers = start_build_processes()
        hash_compiler_ahead()
    from worker.build import build_engine

    times.over("imports")
    return build_engine(
        worker, events, progress=progress, faults=faults, hold_s=hold_s, on_phase=times.over, compilers=compilers
    )


def end_process(error: WorkerError) -> NoReturn:
    """End this process at once, so that whoever watches it starts another."""
    log.critical("the engine failed (%s); this replica exits", type(error).__name__)
    logging.shutdown()
    os._exit(ENGINE_FAILED)
