"""How a private Ray and its pool stop. No Ray is started."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest

from cluster import local_pool
from cluster.config import RouterConfig
from cluster.local_pool import LocalPool, LocalPoolConfig, PoolLost, PoolStartFailed, check_gpus
from cluster.private_ray import GCS, RAYLET, PrivateRay
from cluster.transport import check_free
from worker.config import WorkerConfig


class StoppingRay(PrivateRay):
    """Notes what a stop does; disconnecting takes as long as the test lets it."""

    def __init__(self, lost: str = "") -> None:
        super().__init__(num_cpus=1)
        self.steps: list[str] = []
        self.may_go_on = threading.Event()
        self.lost = lost
        census: Any = self._census
        census.observe = lambda: None
        census.end = self._end

    def lost_daemon(self) -> str:
        return self.lost

    def _end(self, grace_s: float) -> list[str]:
        self.steps.append("end all" if grace_s else "kill all")
        return ["late"] if grace_s else ["early"]

    def _shutdown(self) -> None:
        self.may_go_on.wait(10)
        self.steps.append("disconnect")


async def test_a_stop_whose_caller_is_cancelled_goes_on_and_the_next_caller_waits_for_its_end() -> None:
    ray = StoppingRay()
    first = asyncio.create_task(ray.stop())
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(ray.stop())
    await asyncio.sleep(0.01)
    assert not second.done()
    ray.may_go_on.set()
    assert await second == ["late"]
    assert await ray.stop() == ["late"]
    assert ray.steps == ["disconnect", "end all"]


@pytest.mark.parametrize(("lost", "first"), [(GCS, ["kill all"]), (RAYLET, []), ("", [])])
async def test_without_their_gcs_processes_are_not_waited_for(lost: str, first: list[str]) -> None:
    ray = StoppingRay(lost)
    ray.may_go_on.set()
    assert await ray.stop() == ["late"]
    assert ray.steps == [*first, "disconnect", "end all"]


@pytest.mark.parametrize(("lost_for_s", "drain_s"), [(None, 30.0), (5.0, 30.0), (30.0, 20.0), (49.0, 1.0), (70.0, 0.0)])
async def test_a_pool_without_its_gcs_drains_for_no_longer_than_ray_lets_it(
    lost_for_s: float | None, drain_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = LocalPool(LocalPoolConfig(drain_timeout_s=30.0))
    drains: list[float] = []

    async def drain(grace_s: float) -> None:
        drains.append(grace_s)

    monkeypatch.setattr(pool._router, "drain", drain)
    if lost_for_s is not None:
        pool._gcs_lost_s = time.monotonic() - lost_for_s
    await pool.stop()
    assert drains == [pytest.approx(drain_s, abs=0.5)]


@pytest.mark.parametrize(
    ("drain_s", "lost_for_s", "is_over"), [(10.0, 39.0, False), (10.0, 41.0, True), (0.0, 51.0, True)]
)
def test_a_pool_gives_up_while_there_is_time_to_drain(
    drain_s: float, lost_for_s: float, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = LocalPool(LocalPoolConfig(drain_timeout_s=drain_s))
    pool._has_ray = True
    monkeypatch.setattr(pool._ray, "lost_daemon", lambda: GCS)
    monkeypatch.setattr(pool, "ready", lambda: ["a replica"])
    monkeypatch.setattr(pool, "_gcs_lost_s", time.monotonic() - lost_for_s)
    assert local_pool.ENDED_WITHOUT_GCS_S == 50.0
    if is_over:
        with pytest.raises(PoolLost, match="gcs_server has ended"):
            pool.lost_daemon()
    else:
        assert pool.lost_daemon() == GCS


class Lines:
    """A StartProgress that is read."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def doing(self, what: str) -> None:
        self.said.append(f"{what} ...")

    def done(self, what: str) -> None:
        self.said.append(what)

    def model_progress(self, what: str, done: int, total: int) -> None:
        self.said.append(what)


async def test_whatever_it_stops_for_a_pool_says_that_its_ray_has_stopped_and_what_did_not_by_itself() -> None:
    lines, ray = Lines(), StoppingRay()
    ray.may_go_on.set()
    pool = LocalPool(LocalPoolConfig(), lines)
    pool._ray, pool._has_ray = ray, True
    assert await pool.stop() == ["late"]
    assert lines.said == ["stopping Ray ...", "Ray has stopped; these had to be killed: late"]


@pytest.mark.parametrize(
    ("num_found", "num_replicas", "remedy"),
    [(0, 1, "finds none .*: say --device cpu"), (2, 4, "finds only 2 .*: say --replicas 2"), (2, 2, ""), (8, 1, "")],
)
def test_replicas_that_would_wait_for_a_gpu_for_ever_are_refused(
    num_found: int, num_replicas: int, remedy: str
) -> None:
    if remedy:
        with pytest.raises(PoolStartFailed, match=remedy):
            check_gpus(num_found, num_replicas)
    else:
        check_gpus(num_found, num_replicas)


async def test_cuda_without_a_driver_is_refused_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_pool, "has_driver", lambda: False)
    lines = Lines()
    with pytest.raises(PoolStartFailed, match="no NVIDIA driver"):
        await LocalPool(LocalPoolConfig(worker=WorkerConfig(device="cuda")), lines).__aenter__()
    assert lines.said == []


@pytest.mark.parametrize("offset", [0, 1, 2])
async def test_a_taken_port_is_found_before_the_model_is_looked_for(offset: int) -> None:
    lines = Lines()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] - offset
        router = RouterConfig(listen="127.0.0.1:0", metrics_listen=f"127.0.0.1:{port}")
        with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port + offset}"):
            await LocalPool(LocalPoolConfig(router=router), lines).__aenter__()
    assert lines.said == []


async def test_a_port_that_is_free_passes_and_stays_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match="is taken"):
            check_free(listen)
    check_free(listen)
    check_free(listen)
    check_free("")
    check_free("127.0.0.1:0")
