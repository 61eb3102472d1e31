"""A router process and a private Ray with replicas under Serve, for a benchmark that watches them from outside."""

from __future__ import annotations

from cluster.private_ray import PrivateRay  # first: it sets what gRPC reads when it is imported

import asyncio  # isort: skip
import contextlib
import json
import os
import random
import socket
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench.options import bench_parser
from cluster.client import AsyncGraphpoolClient
from cluster.config import ReplicaConfig, RouterConfig
from cluster.router.server import RouterServer
from cluster.serve_app import APP_NAME, PoolConfig, deploy, start_problem
from protos import control_pb2

ROOT = Path(__file__).resolve().parents[1]
READY, FULL = control_pb2.REPLICA_STATE_READY, control_pb2.GRAPH_READINESS_FULL
STOPPED, FAILED = control_pb2.REPLICA_STATE_STOPPED, control_pb2.REPLICA_STATE_FAILED
MAX_PLACES = 6
"""Metrics ports that are looked at: one for each replica, and some for those that come while others go."""
POLL_S = 0.02
FIRST_PORT, LAST_PORT = 20_000, 32_000

ReplicaLoad = control_pb2.ReplicaLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a replica's metrics say it is."""

    incarnation: str
    pid: int
    device: str
    visible_devices: str
    began_s: float
    """Unix time of the start of its process."""
    phases: dict[str, float]
    """Seconds from there to the end of each phase."""
    values: dict[str, float]
    """Metrics without labels, by name."""


class BenchPool:
    """`router`: its address. `client` asks there. Every wait is bounded and raises TimeoutError that says for what."""

    def __init__(self, ray: PrivateRay, router: str, client: AsyncGraphpoolClient, metrics_port: int) -> None:
        self.ray = ray
        self.router = router
        self.client = client
        self._metrics_port = metrics_port

    def replica_config(self) -> ReplicaConfig:
        """Of every replica: announces here, with metrics."""
        return ReplicaConfig(
            routers=(self.router,), metrics_listen=f"127.0.0.1:{self._metrics_port}", announce_period_s=0.25
        )

    async def deploy(self, config: PoolConfig) -> None:
        """Make the application what it is to be, without waiting for it."""
        await self.ray.call(deploy, config)

    async def remove(self, timeout_s: float = 30.0) -> None:
        """Take the application away; returns when the router knows no ready replica."""
        await asyncio.wait_for(self.ray.call(_delete), timeout_s)
        await self.until(lambda found: not found, timeout_s, "the replicas are gone")

    async def replicas(self) -> list[ReplicaLoad]:
        """All that the router knows."""
        return list(await self.client.loads(timeout_s=5))

    async def ready(self) -> dict[str, ReplicaLoad]:
        """Those that take requests, by incarnation."""
        return {one.incarnation: one for one in await self.replicas() if one.state == READY}

    async def until(
        self, condition: Callable[[dict[str, ReplicaLoad]], bool], timeout_s: float, what: str
    ) -> dict[str, ReplicaLoad]:
        """Wait until the ready replicas are as wanted. Fails early when Serve has given up."""
        give_up_s, asked_s = time.monotonic() + timeout_s, 0.0
        while True:
            found = await self.ready()
            if condition(found):
                return found
            now_s = time.monotonic()
            if now_s > give_up_s:
                raise TimeoutError(
                    f"not within {timeout_s:.0f} s: {what}; ready are {[one.replica for one in found.values()]}"
                )
            if now_s > asked_s + 2:
                asked_s = now_s
                await self._check()
            await asyncio.sleep(POLL_S)

    async def until_left(self, timeout_s: float) -> None:
        """Wait until the router knows one replica alone, and that one is ready: another may only have been out of service."""
        give_up_s = time.monotonic() + timeout_s
        while [one.state for one in await self.replicas() if one.state not in (STOPPED, FAILED)] != [READY]:
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"not within {timeout_s:.0f} s: one replica is left")
            await asyncio.sleep(POLL_S)

    async def until_count(self, count: int, timeout_s: float, *, without: str = "") -> dict[str, ReplicaLoad]:
        """Wait for so many ready replicas, one incarnation not among them."""
        return await self.until(
            lambda found: len(found) == count and without not in found, timeout_s, f"{count} ready replicas"
        )

    async def until_captured(self, timeout_s: float) -> tuple[bool, float | None]:
        """Wait until no ready replica captures graphs any more; (whether all are FULL, unix time of the end if it came)."""
        give_up_s, quiet_since_s = time.monotonic() + timeout_s, None
        before: dict[str, float] = {}
        while time.monotonic() < give_up_s:
            found = await self.ready()
            if found and all(one.load.readiness == FULL for one in found.values()):
                return True, time.time()
            spent = {place.incarnation: place.values.get("graph_capture_seconds", 0.0) for place in await self.places()}
            # Without graphs, or with some given up, it never becomes FULL: then nothing is spent any more.
            if spent != before:
                before, quiet_since_s = spent, time.time()
            elif quiet_since_s and time.time() - quiet_since_s > 4:
                return False, quiet_since_s
            await asyncio.sleep(0.1)
        return False, None

    async def places(self) -> list[Place]:
        """Of all replicas that answer, ready or not."""
        ports = range(self._metrics_port, self._metrics_port + MAX_PLACES)
        found = await asyncio.gather(*(asyncio.to_thread(_scrape, port) for port in ports))
        return [place for place in found if place is not None]

    async def place_of(self, incarnation: str) -> Place:
        """Of one replica. Raises LookupError."""
        for place in await self.places():
            if place.incarnation == incarnation:
                return place
        raise LookupError(f"no metrics port answers for {incarnation}")

    async def _check(self) -> None:
        with contextlib.suppress(KeyError):
            problem = await self.ray.call(start_problem)
            if problem is not None:
                raise RuntimeError(f"Serve gave up: {problem}")


@contextlib.asynccontextmanager
async def bench_pool(*, num_cpus: int, num_gpus: int, temp_dir: Path) -> AsyncIterator[BenchPool]:
    """Router and Ray; nothing is deployed yet. Ray and its processes are gone at the end."""
    _share_imports()
    ray = PrivateRay(num_cpus=num_cpus, num_gpus=num_gpus, temp_dir=temp_dir)
    async with router_process() as address:
        try:
            await asyncio.wait_for(ray.start(), 90)
            async with AsyncGraphpoolClient(address) as client:
                yield BenchPool(ray, address, client, free_ports(MAX_PLACES))
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(ray.stop(), 45)


@contextlib.asynccontextmanager
async def router_process() -> AsyncIterator[str]:
    """One that holds requests until a replica is ready; its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.serve_pool"),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            address = json.loads(await process.stdout.readline())["address"]
        yield address
    finally:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 10)
        if process.returncode is None:
            process.kill()


async def route() -> None:
    """The router process: prints its address, and serves until it is ended, or whoever started it is."""
    config = RouterConfig(
        listen="127.0.0.1:0",
        wait_for_replica_s=120.0,
        announce_period_s=0.25,
        reconnect_max_s=0.5,
        canary_timeout_s=60.0,
    )
    server = RouterServer(config)
    await server.start()
    print(json.dumps({"address": server.address}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that nobody listens on, none of which the kernel gives to a connection."""
    while True:
        first = random.randrange(FIRST_PORT, LAST_PORT - count)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first


def _share_imports() -> None:
    """Ray's processes find packages where this one does, whatever folder they start in."""
    paths = [
        str(ROOT),
        *(str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def _delete() -> None:
    from ray import serve

    serve.delete(APP_NAME)


def _scrape(port: int) -> Place | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=3) as response:
            text = response.read().decode()
    except OSError:
        return None
    labels: dict[str, str] = {}
    phases: dict[str, float] = {}
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("graphpool_")
            if name == "replica_info":
                labels = sample.labels
            elif name == "start_seconds":
                phases[sample.labels["phase"]] = sample.value
            elif not sample.labels:
                values[name] = sample.value
    if not labels:
        return None
    return Place(
        incarnation=labels["incarnation"],
        pid=int(labels["pid"]),
        device=labels["device"],
        visible_devices=labels["visible_devices"],
        began_s=values["start_time_seconds"],
        phases=phases,
        values=values,
    )


if __name__ == "__main__":
    bench_parser(f"{__doc__} Run by itself, this is the router process.").parse_args()
    asyncio.run(route())
