"""A whole pool on this machine: a private Ray with replicas under Serve, and the router in this process."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol, Self

import psutil

from cluster.config import ReplicaConfig, RouterConfig, join_address, split_address
from cluster.errors import ClusterError
from cluster.private_ray import GCS, PrivateRay
from cluster.router.membership import MAX_REPLICAS
from cluster.router.server import RouterServer
from cluster.security.local_secret import LocalSecret
from cluster.serve_app import PoolConfig, deploy, num_gpus_of, share_cores, start_problem
from cluster.transport import check_free
from protos import control_pb2
from worker.config import WorkerConfig
from worker.context_ahead import has_driver

POLL_S = 0.2
ENDED_WITHOUT_GCS_S = 50.0
"""Ray gives a process 60 s without a GCS, of which disconnecting takes 5."""


class PoolStartFailed(ClusterError):
    """The pool did not come up; the message says why."""


class PoolLost(ClusterError):
    """The pool cannot go on, because a daemon of its Ray has ended; the message says which."""


class StartProgress(Protocol):
    """Where a starting pool says what it is at."""

    def doing(self, what: str) -> None:
        """This has begun."""

    def done(self, what: str) -> None:
        """This is finished."""

    def model_progress(self, what: str, done: int, total: int) -> None:
        """How far the work on model files is, in bytes; called from another thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPoolConfig:
    """A pool on one machine."""

    worker: WorkerConfig = field(default_factory=WorkerConfig)
    """What each replica runs."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """How clients reach the pool."""
    num_replicas: int = 2
    """Replicas to keep alive."""
    flush_interval_ms: float = 8.0
    """Least time between two messages of an answer; 0 = a message for every step."""
    start_timeout_s: float = 900.0
    """For everything up to the last replica's canary; a first start may fetch or convert a model."""
    drain_timeout_s: float = 10.0
    """How long requests may go on once the pool is told to stop."""

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas is {self.num_replicas}, must be at least 1")
        if self.num_replicas > MAX_REPLICAS:
            raise ValueError(f"num_replicas is {self.num_replicas}, a router takes {MAX_REPLICAS}")
        if self.router.metrics_listen:
            port = split_address("metrics_listen", self.router.metrics_listen)[1]
            if port + self.num_replicas > 65535:
                raise ValueError(f"metrics port {port} leaves no ports after it for {self.num_replicas} replicas")
        if not self.start_timeout_s > 0:
            raise ValueError(f"start_timeout_s is {self.start_timeout_s}, must be positive")
        if not self.drain_timeout_s >= 0:
            raise ValueError(f"drain_timeout_s is {self.drain_timeout_s}, must not be negative")


class LocalPool:
    """`async with LocalPool(config) as pool:` serves at `pool.address` until the block ends, and leaves no process."""

    def __init__(self, config: LocalPoolConfig, progress: StartProgress | None = None) -> None:
        self._config = config
        self._progress = progress or SilentProgress()
        self._secret = LocalSecret(config.router.security)
        self._router = RouterServer(replace(config.router, security=self._secret.security))
        num_gpus = None if num_gpus_of(config.worker) else 0
        self._ray = PrivateRay(num_cpus=config.num_replicas, num_gpus=num_gpus)
        self._has_ray = False
        self._gcs_lost_s: float | None = None

    @property
    def address(self) -> str:
        """host:port of the router."""
        return self._router.address

    @property
    def metrics_address(self) -> str:
        """host:port of the router's metrics; "" when they are off."""
        return self._router.metrics_address

    async def __aenter__(self) -> Self:
        """Return once every replica is READY in the router. Raises PoolStartFailed, or OSError for a taken port."""
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._start()
        except TimeoutError:
            await self.stop()
            raise PoolStartFailed(f"the pool was not ready within {self._config.start_timeout_s:.0f} s") from None
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Stop the pool."""
        await self.stop()

    def loads(self) -> Sequence[control_pb2.ReplicaLoad]:
        """Every replica the router knows, with its state and load."""
        return self._router.pool.loads()

    async def model_info(self) -> control_pb2.ModelInfo:
        """The model that the replicas serve."""
        return await self._router.pool.model_info(self._config.worker.name)

    def ready(self) -> list[control_pb2.ReplicaLoad]:
        """The replicas that take requests."""
        return [replica for replica in self.loads() if replica.state == control_pb2.REPLICA_STATE_READY]

    def processes(self) -> list[psutil.Process]:
        """Every process of the pool but this one."""
        return self._ray.processes() if self._has_ray else []

    def process_of(self, replica: control_pb2.ReplicaLoad) -> psutil.Process | None:
        """The process that listens on the replica's port."""
        port = int(replica.address.rpartition(":")[2])
        return next((process for process in self.processes() if port in _listening_ports(process)), None)

    def lost_daemon(self) -> str:
        """The daemon of Ray that has ended: from then on nobody replaces replicas; "" while all are there.

        Raises PoolLost when the pool has nothing left to answer with, or soon will not: without its GCS, Ray ends every
        process that is connected to it after a minute, this one too. Until what runs has to end, the pool serves on.
        """
        lost = self._ray.lost_daemon() if self._has_ray else ""
        if lost == GCS and self._gcs_lost_s is None:
            self._gcs_lost_s = time.monotonic()
        is_near_its_end = self._left_s <= self._config.drain_timeout_s
        if is_near_its_end or (lost and not self.ready()):
            raise PoolLost(f"Ray's {lost} has ended, and the pool cannot go on without it: start it again")
        return lost

    @property
    def _left_s(self) -> float:
        """How long there is for what runs to drain: without a GCS, Ray ends this process too."""
        if self._gcs_lost_s is None:
            return math.inf
        return max(self._gcs_lost_s + ENDED_WITHOUT_GCS_S - time.monotonic(), 0.0)

    async def stop(self) -> list[str]:
        """Finish what runs, then end every process; returns the names of those that had to be killed."""
        if self._router.pool.num_live:
            self._progress.doing("finishing what is running")
        await self._router.drain(min(self._config.drain_timeout_s, self._left_s))
        await self._router.stop()
        self._secret.close()
        if not self._has_ray:
            return []
        self._has_ray = False
        self._progress.doing("stopping Ray")
        killed = await self._ray.stop()
        self._progress.done("Ray has stopped" + (f"; these had to be killed: {', '.join(killed)}" if killed else ""))
        return killed

    async def _start(self) -> None:
        config = self._config
        self._check_machine()
        await self._router.start()
        self._progress.done(f"router at {self.address}")
        await self._prepare_model()
        self._progress.doing("starting Ray")
        self._has_ray = True
        await self._ray.start()
        if num_gpus_of(config.worker):
            check_gpus(await self._ray.call(gpus_of_ray), config.num_replicas)
        self._progress.doing("starting Ray Serve")
        await self._ray.call(deploy, self._pool_config())
        self._progress.done("Ray Serve, with a token and a folder of its own")
        count = "one replica loads" if config.num_replicas == 1 else f"{config.num_replicas} replicas load"
        self._progress.doing(f"{count} {config.worker.model}")
        await self._wait_until_ready()

    def _check_machine(self) -> None:
        """Find out at once what would end the start after minutes. Raises PoolStartFailed, or OSError for a taken port."""
        config = self._config
        if config.worker.device == "cuda" and not has_driver():
            raise PoolStartFailed("there is no NVIDIA driver on this machine, so no replica can have --device cuda")
        listen = config.router.metrics_listen
        for _ in range(config.num_replicas):
            listen = next_metrics_address(listen)
            check_free(listen)

    async def _prepare_model(self) -> None:
        """Fetch or convert the model here, once and in sight, and find out early when it cannot be served."""
        from worker.model.source import resolve_model

        worker = self._config.worker
        self._progress.doing(f"looking for {worker.model}")
        await asyncio.to_thread(
            resolve_model,
            worker.model,
            load_format=worker.load_format,
            cache_dir=worker.cache_dir,
            progress=self._progress.model_progress,
        )

    def _pool_config(self) -> PoolConfig:
        config = self._config
        return PoolConfig(
            worker=share_cores(config.worker, config.num_replicas, os.cpu_count() or 1),
            replica=ReplicaConfig(
                routers=(self.address,),
                insecure=config.router.insecure,
                security=self._secret.security,
                metrics_listen=next_metrics_address(config.router.metrics_listen),
                flush_interval_ms=config.flush_interval_ms,
                max_flush_interval_ms=max(64.0, config.flush_interval_ms),
            ),
            num_replicas=config.num_replicas,
            max_start_attempts=1,
            drain_timeout_s=max(config.drain_timeout_s, 0.1),
        )

    async def _wait_until_ready(self) -> None:
        seen: set[str] = set()
        while len(seen) < self._config.num_replicas:
            await asyncio.sleep(POLL_S)
            for replica in self.ready():
                if replica.replica not in seen:
                    seen.add(replica.replica)
                    self._progress.done(f"{replica.replica} ready at {replica.address}")
            problem = await self._ray.call(start_problem)
            if problem is not None:
                raise PoolStartFailed(f"the replicas cannot start: {problem}")


def gpus_of_ray() -> int:
    """GPUs that Ray has found. Needs a connection to it."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def check_gpus(num_found: int, num_replicas: int) -> None:
    """Raise PoolStartFailed for replicas that would wait for a GPU for ever."""
    if num_replicas <= num_found:
        return
    found = "none" if num_found == 0 else f"only {num_found}"
    remedy = "--device cpu" if num_found == 0 else f"--replicas {num_found}"
    raise PoolStartFailed(
        f"each replica takes a GPU of its own, {num_replicas} in all, and Ray finds {found} "
        f"(CUDA_VISIBLE_DEVICES counts): say {remedy}"
    )


def next_metrics_address(address: str) -> str:
    """Where the first replica's metrics are, when the router's are at `address`; "" and port 0 stand for themselves."""
    if not address:
        return ""
    host, port = split_address("metrics_listen", address)
    return join_address(host, port + 1 if port else 0)


class SilentProgress:
    """A StartProgress nobody watches."""

    def doing(self, what: str) -> None:
        """Say nothing."""

    def done(self, what: str) -> None:
        """Say nothing."""

    def model_progress(self, what: str, done: int, total: int) -> None:
        """Say nothing."""


def _listening_ports(process: psutil.Process) -> set[int]:
    try:
        return {link.laddr.port for link in process.net_connections("tcp") if link.status == psutil.CONN_LISTEN}
    except psutil.Error:
        return set()
