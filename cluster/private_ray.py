"""A Ray of this process's own on this machine: started for one pool, gone with it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil

from cluster.process_census import ProcessCensus, runs

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's least: nothing of ours goes through its object store."""
EXIT_GRACE_S = 5.0
GCS, RAYLET = "gcs_server", "raylet"
"""The daemons that no Ray is without. A lost GCS takes the others, and the process that is connected, after a minute."""
ENVIRONMENT = {
    # gRPC's fork handlers hang or crash the daemons that are forked beside a live grpc.aio channel. It is read when
    # gRPC is imported, so this module is imported before any that does.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    # Whoever reaches Ray's ports can run code: only holders of the token may.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A replica that fails its health check is of no more use to its streams: end it without the drain's wait.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Ray makes its workers give way to everything else on the machine: a replica would stand still beside any busy job.
    "RAY_worker_niceness": "0",
}


def prepare_environment() -> None:
    """Set what Ray and gRPC read when they are imported, here and in every process started from here."""
    if "grpc" in sys.modules and "GRPC_ENABLE_FORK_SUPPORT" not in os.environ:
        log.warning("gRPC was imported before GRPC_ENABLE_FORK_SUPPORT=0 was set: Ray may hang when it starts")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Ray reads the token once in a process, so every pool of this process shares it.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


prepare_environment()


def take_sigterm_back() -> None:
    """Make the handler that Python knows of the process's own again.

    A starting Ray puts one in front of it that prints a stack trace and aborts the process three seconds later,
    whatever it is in the middle of finishing.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is None or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, handler)
    signal.siginterrupt(signal.SIGTERM, False)


class PrivateRay:
    """One Ray head on loopback, with its own folder, ports and token: it neither finds nor disturbs another Ray.

    All calls into Ray run on one thread that lives as long as this object. The daemons are told by the kernel to die
    with the thread that started them, so a thread pool's passing thread would not do.
    """

    def __init__(self, *, num_cpus: int, num_gpus: int | None = None, temp_dir: Path | None = None) -> None:
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self._temp_dir = temp_dir
        self._folder = temp_dir
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray")
        self._census = ProcessCensus(self._is_daemon)
        self._daemons: list[tuple[str, psutil.Process]] = []
        self._stopping: asyncio.Future[list[str]] | None = None

    @property
    def folder(self) -> Path | None:
        """Where its sockets and logs are; None before it starts."""
        return self._folder

    async def start(self) -> None:
        """Start the daemons and connect. On any failure nothing is left running."""
        # Unix socket paths are short: Ray's lie deep under this folder.
        self._folder = self._temp_dir or Path(tempfile.mkdtemp(prefix="graphpool-", dir="/tmp"))
        try:
            await self.call(self._init)
        except BaseException:
            await asyncio.shield(self.stop())
            raise
        take_sigterm_back()
        self._daemons = [(process.name(), process) for process in self.processes() if process.name() in (GCS, RAYLET)]

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` on Ray's thread. A cancelled caller does not wait, but the next call does."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))

    async def stop(self) -> list[str]:
        """Disconnect and end every process; returns the names of those that had to be killed. Once is enough.

        A cancelled caller does not end it half-way, and another one waits for the same end.
        """
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop(self.lost_daemon()))
        return await asyncio.shield(self._stopping)

    async def _stop(self, lost: str) -> list[str]:
        self._census.observe()
        if lost == GCS:
            # The others would first wait for it, and Ray ends this process a minute after it was lost.
            await self.call(self._census.end, 0.0)
        await self.call(self._shutdown)
        take_sigterm_back()
        killed = await self.call(self._census.end, EXIT_GRACE_S)
        self._thread.shutdown(wait=False)
        if self._folder and not self._temp_dir:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        return killed

    def processes(self) -> list[psutil.Process]:
        """Every live process of this Ray, daemons and workers."""
        self._census.observe()
        return self._census.alive()

    def lost_daemon(self) -> str:
        """The name of a daemon that has ended although nobody asked it to; "" while all are there."""
        lost = [name for name, process in self._daemons if not runs(process)]
        return "" if self._stopping is not None else GCS if GCS in lost else "".join(lost)

    def _init(self) -> None:
        import ray

        if ray.is_initialized():
            raise RuntimeError("Ray runs in this process already; a pool needs one of its own")
        logging.getLogger("ray").setLevel(logging.ERROR)
        # Ray tells of every lost worker on our stdout, whatever its logging is set to; the router says it better.
        ray._private.worker._worker_logs_enabled = False
        ray.init(
            "local",
            num_cpus=self._num_cpus,
            num_gpus=self._num_gpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="graphpool",
            _node_ip_address="127.0.0.1",
            _temp_dir=str(self._folder),
        )

    def _shutdown(self) -> None:
        import ray

        ray.shutdown()

    def _is_daemon(self, process: psutil.Process) -> bool:
        return any(str(self._folder) in argument for argument in process.cmdline())
