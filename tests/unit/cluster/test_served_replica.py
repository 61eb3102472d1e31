"""Where a replica that Serve has placed finds things."""

from __future__ import annotations

import pickle
import socket
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cluster.client import AsyncGraphpoolClient
from cluster.config import Keepalive, ReplicaConfig, from_mapping
from cluster.replica.events import EventFanout
from cluster.replica.server import ReplicaServer
from cluster.replica.start_times import StartTimes
from cluster.replica_process import ReplicaProcess
from cluster.security.config import SecurityConfig
from cluster.serve_app import PoolConfig, build_app, router_address, with_router_addresses
from cluster.served_place import free_metrics_address, free_name, names_in_use, place_name
from cluster.served_replica import ServedReplica
from protos import control_pb2
from tests.fakes.script_engine import ScriptEngine, ScriptKnobs
from tests.fakes.script_pool import script_pool
from worker.config import WorkerConfig
from worker.errors import Draining


@pytest.mark.parametrize(
    ("router", "found"),
    [
        ("head-address:50050", "10.0.0.10:50050"),
        ("10.0.0.7:50051", "10.0.0.7:50051"),
        ("router.internal:50050", "router.internal:50050"),
        ("my-head-address:50050", "my-head-address:50050"),
    ],
)
def test_a_router_on_the_head_needs_no_address_in_the_config(router: str, found: str) -> None:
    assert router_address(router, "10.0.0.10:6379") == found


def test_an_ipv6_head_keeps_its_brackets() -> None:
    assert router_address("head-address:50050", "[fd00::10]:6379") == "[fd00::10]:50050"


def test_without_the_heads_name_no_ray_is_asked() -> None:
    replica = ReplicaConfig(routers=("10.0.0.7:50051",))
    assert with_router_addresses(replica) is replica


def test_replicas_of_two_applications_do_not_take_each_others_names() -> None:
    assert place_name("graphpool", 0) == "replica-0"
    assert place_name("llama", 0) == "llama-0"


@pytest.mark.parametrize(
    ("rank", "in_use", "name"),
    [
        (0, (), "replica-0"),
        (2, ("replica-0", "replica-1", "llama-2"), "replica-2"),
        (1, ("replica-1",), "replica-0"),
        (2, ("replica-0", "replica-2"), "replica-1"),
        (0, ("replica-0", "replica-1"), "replica-2"),
        (2, ("replica-2", "replica-3"), "replica-0"),
        (3, ("replica-2", "replica-3"), "replica-1"),
        (5, ("replica-4", "replica-5", "x"), "replica-1"),
    ],
)
def test_a_new_replica_takes_no_name_from_one_that_runs(rank: int, in_use: tuple[str, ...], name: str) -> None:
    assert free_name("graphpool", rank, in_use) == name


def test_replicas_that_start_together_never_choose_the_same_name() -> None:
    in_use = [place_name("llama", number) for number in (2, 3, 5)]
    names = [free_name("llama", rank, in_use) for rank in (3, 4, 5, 6)]
    assert len({*names, *in_use}) == len(names) + len(in_use)


async def test_names_are_asked_of_the_routers_and_a_silent_one_is_passed_over() -> None:
    async with script_pool(2) as pool:
        names = {one.replica for one in pool.router.pool.loads()}
        config = ReplicaConfig(routers=("127.0.0.1:9", pool.router.address))
        assert len(names) == 2
        assert await names_in_use(config) == names


async def test_the_name_of_a_replica_whose_connection_broke_is_free_for_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with script_pool(2) as pool:
        loads = [*pool.router.pool.loads()]
        loads[0].state, loads[0].breaker = control_pb2.REPLICA_STATE_STARTING, control_pb2.BREAKER_HALF_OPEN
        monkeypatch.setattr(pool.router.pool, "loads", lambda: loads)
        config = ReplicaConfig(routers=(pool.router.address,))
        assert await names_in_use(config) == {loads[1].replica}


def test_a_metrics_port_that_has_a_listener_is_left_to_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found = free_metrics_address(address, 0)
        assert found != address
        assert found.startswith("127.0.0.1:")
    assert free_metrics_address(address, 0) == address
    assert (free_metrics_address("", 3), free_metrics_address("127.0.0.1:0", 3)) == ("", "127.0.0.1:0")


def test_configs_reach_a_replica_by_the_names_of_their_fields() -> None:
    worker = WorkerConfig(device="cpu", tiers=(8, 16, 32, 64), cache_dir=Path("/tmp/x"))
    security = SecurityConfig(tokens="/etc/tokens.yaml")
    replica = ReplicaConfig(routers=("a:1",), security=security, keepalive=Keepalive(time_s=20.0))
    deployment = build_app(PoolConfig(worker=worker, replica=replica))._bound_deployment
    travelled = pickle.loads(pickle.dumps(deployment.init_args))
    assert [type(value) for value in travelled] == [dict, dict, float]
    assert from_mapping(WorkerConfig, travelled[0]) == worker
    assert from_mapping(ReplicaConfig, travelled[1]) == replica


@pytest.mark.filterwarnings("ignore:coroutine .ServedReplica.__del__. was never awaited")  # Serve awaits it
async def test_a_config_of_another_version_is_refused_by_name() -> None:
    served = ServedReplica.__new__(ServedReplica)
    with pytest.raises(ValueError, match="WorkerConfig has no 'warp_factor'"):
        await served.__init__({**asdict(WorkerConfig()), "warp_factor": 9}, asdict(ReplicaConfig()), 1.0)  # type: ignore[misc]
    with pytest.raises(ValueError, match="ReplicaConfig has no 'prot'"):
        await served.__init__(asdict(WorkerConfig()), {**asdict(ReplicaConfig()), "prot": 1}, 1.0)  # type: ignore[misc]
    await served.__del__()  # which Serve awaits after a failed start, too


@pytest.mark.filterwarnings("ignore:coroutine .ServedReplica.__del__. was never awaited")  # Serve awaits it
async def test_the_time_to_drain_and_the_routers_change_while_a_replica_runs() -> None:
    served = ServedReplica.__new__(ServedReplica)
    graces: list[float] = []
    routers: list[str] = []

    async def close(*, grace_s: float) -> None:
        graces.append(grace_s)

    served._process = SimpleNamespace(close=close, server=SimpleNamespace(announce_to=routers.extend))  # type: ignore[assignment]
    await served.reconfigure({"drain_timeout_s": 30, "routers": ["a:1", "b:2"]})
    await served.__del__()
    assert graces == [30.0]
    assert routers == ["a:1", "b:2"]


@pytest.mark.filterwarnings("ignore:coroutine .ServedReplica.__del__. was never awaited")  # Serve awaits it
async def test_a_replica_that_was_drained_by_request_is_unhealthy() -> None:
    events = EventFanout()
    engine = ScriptEngine(events, ScriptKnobs())
    server = ReplicaServer(ReplicaConfig(), engine, events=events)
    await server.start()
    served = ServedReplica.__new__(ServedReplica)
    served._process = ReplicaProcess(engine, server)
    await served.check_health()
    async with AsyncGraphpoolClient(server.address) as client:
        await client.drain(grace_s=1.0)
    with pytest.raises(Draining, match="was drained"):
        await served.check_health()
    await server.stop()
    engine.stop()


def test_phases_of_a_start_end_once_and_in_turn() -> None:
    now_s = iter((101.0, 103.5, 900.0))
    times = StartTimes(began_s=100.0, clock=lambda: next(now_s))
    for phase in ("imports", "weights", "imports"):
        times.over(phase)
    assert list(times.phases.items()) == [("imports", 1.0), ("weights", 3.5)]


def test_a_start_begins_with_its_process() -> None:
    times = StartTimes()
    times.over("now")
    began_s = psutil.Process().create_time()
    assert times.began_s == pytest.approx(began_s, abs=1.5)
    assert times.phases["now"] == pytest.approx(time.time() - began_s, abs=2.5)
