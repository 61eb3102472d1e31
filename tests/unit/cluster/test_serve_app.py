"""The Serve application's configuration: resources, environment, and what is refused. No Ray is started."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.autoscale.config import ScalingConfig
from cluster.config import ReplicaConfig
from cluster.deployment_version import code_version
from cluster.serve_app import PoolConfig, actor_options, build_app, last_cause, num_gpus_of, pool_config, share_cores
from cluster.surge import places
from worker.config import WorkerConfig

ROUTED = ReplicaConfig(routers=("127.0.0.1:50050",))


def test_a_replica_on_cuda_owns_one_gpu_and_keeps_what_ray_makes_visible() -> None:
    options = actor_options(PoolConfig(worker=WorkerConfig(device="cuda"), replica=ROUTED))
    assert options["num_gpus"] == 1
    assert "CUDA_VISIBLE_DEVICES" not in options["runtime_env"]["env_vars"]


def test_a_replica_on_the_cpu_sees_no_gpu() -> None:
    options = actor_options(PoolConfig(worker=WorkerConfig(device="cpu"), replica=ROUTED))
    assert options["num_gpus"] == 0
    assert options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] == ""


def test_a_share_of_a_gpu_can_be_asked_for() -> None:
    assert actor_options(PoolConfig(replica=ROUTED, num_gpus=0.5))["num_gpus"] == 0.5


def test_the_threads_of_a_worker_reach_the_libraries_that_read_the_environment() -> None:
    options = actor_options(PoolConfig(worker=WorkerConfig(device="cpu", cpu_threads=3), replica=ROUTED))
    assert options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("replicas", "cores", "threads"), [(1, 2, 2), (2, 2, 1), (3, 2, 1), (2, 9, 4)])
def test_cpu_replicas_share_the_cores(replicas: int, cores: int, threads: int) -> None:
    assert share_cores(WorkerConfig(device="cpu"), replicas, cores).cpu_threads == threads


def test_a_chosen_number_of_threads_stays() -> None:
    assert share_cores(WorkerConfig(device="cpu", cpu_threads=7), 2, 2).cpu_threads == 7


def test_replicas_on_cuda_keep_their_own_choice_of_threads() -> None:
    assert share_cores(WorkerConfig(device="cuda"), 2, 8).cpu_threads is None


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0.0), ("cuda", 1.0)])
def test_the_device_decides_the_gpus(device: Any, gpus: float) -> None:
    assert num_gpus_of(WorkerConfig(device=device)) == gpus


def test_plain_values_become_a_config() -> None:
    config = pool_config(
        {"num_replicas": 2, "worker": {"device": "cpu", "tiers": [8, 16, 32, 64]}, "replica": {"routers": ["a:1"]}}
    )
    assert config.worker.tiers == (8, 16, 32, 64)
    assert config.replica.routers == ("a:1",)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replica": {"routers": ["a:1"]}, "num_replica": 2}, "num_replica"),
        ({"replica": {"routers": ["a:1"]}, "worker": {"modle": "x"}}, "modle"),
        ({"replica": {"routers": ["a:1"], "prot": 1}}, "prot"),
        ({"replica": {"routers": ["a:1"]}, "num_replicas": 0}, "num_replicas"),
        ({"replica": {"routers": ["a:1"]}, "drain_timeout_s": 0.0}, "drain_timeout_s"),
        ({"replica": {"routers": ["a:1"]}, "surge": "no"}, "surge"),
        ({"replica": {"routers": ["a:1"]}, "revision": 2}, "revision"),
        ({}, "routers"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        pool_config(values)


def test_the_application_asks_serve_for_quick_checks_and_a_drain() -> None:
    deployment = build_app(PoolConfig(replica=ROUTED, num_replicas=3, drain_timeout_s=30.0))._bound_deployment
    assert deployment.num_replicas == 3
    config = deployment._deployment_config
    assert (config.health_check_period_s, config.graceful_shutdown_wait_loop_s) == (1.0, 0.1)
    assert config.graceful_shutdown_timeout_s > 30.0


def version_of(config: PoolConfig) -> str:
    """What Serve's controller is told, whatever version Serve itself has chosen."""
    from ray.serve._private.config import DeploymentConfig

    deployed = build_app(config)._bound_deployment._deployment_config
    deployed.version = "of Serve's own"
    return str(DeploymentConfig.from_proto_bytes(deployed.to_proto_bytes()).version)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_replicas": 5},
        {"scaling": ScalingConfig()},
        {"model_name": "other"},
        {"drain_timeout_s": 7.0},
        {"surge": True},
        {"health_check_period_s": 2.0, "health_check_timeout_s": 9.0, "max_start_attempts": 1},
        {"worker": WorkerConfig(device="cpu"), "replica": ReplicaConfig(routers=("127.0.0.1:50050",))},
        {"replica": replace(ROUTED, flush_interval_ms=8)},
        {"replica": replace(ROUTED, routers=("127.0.0.1:50051", "10.0.0.7:50050"))},
    ],
)
def test_what_replicas_are_not_made_of_leaves_them_alone(changed: dict[str, Any]) -> None:
    config = PoolConfig(worker=WorkerConfig(device="cpu"), replica=ROUTED)
    assert version_of(replace(config, **changed)) == version_of(config)


@pytest.mark.parametrize(
    "changed",
    [
        {"worker": WorkerConfig(device="cpu", max_batch=4)},
        {"worker": WorkerConfig(device="cpu", tiers=(8, 16, 32, 64))},
        {"replica": replace(ROUTED, routers=("127.0.0.1:50051",), listen="127.0.0.1:50052")},
        {"replica": replace(ROUTED, flush_interval_ms=8.5)},
        {"revision": "2"},
    ],
)
def test_what_replicas_are_made_of_replaces_them(changed: dict[str, Any]) -> None:
    config = PoolConfig(worker=WorkerConfig(device="cpu"), replica=ROUTED)
    assert version_of(replace(config, **changed)) != version_of(config)


def test_running_replicas_are_told_of_their_routers() -> None:
    routers = ("127.0.0.1:50051", "[fd00::1]:50050")
    deployment = build_app(PoolConfig(replica=replace(ROUTED, routers=routers)))._bound_deployment
    assert json.loads(json.dumps(deployment.user_config))["routers"] == list(routers)
    assert deployment.init_args[1]["routers"] == routers, "those that a new replica asks for names before it is told"


def test_another_release_replaces_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_version({"a": 1})
    monkeypatch.setattr("cluster.deployment_version.version", lambda: "9.9.9")
    assert code_version({"a": 1}) != before


def test_every_process_makes_the_same_version_of_the_same_config() -> None:
    script = (
        "from cluster.deployment_version import code_version; from worker.config import WorkerConfig; from pathlib import Path;"
        "print(code_version(WorkerConfig(tiers=(8, 16, 32, 64), cache_dir=Path('/x')), dict(b=1.0, a=[None, 'x'])))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    worker = WorkerConfig(tiers=(8, 16, 32, 64), cache_dir=Path("/x"))
    assert found == {code_version(worker, {"a": (None, "x"), "b": 1}) + "\n"}


def test_the_version_refuses_what_has_no_fixed_form() -> None:
    with pytest.raises(TypeError):
        code_version({"names": {"a", "b"}})


@pytest.mark.parametrize(("surge", "percent"), [(True, 20), (False, 0), (None, 0)])
def test_successors_start_first_where_that_is_asked_for_or_there_is_room(surge: bool | None, percent: int) -> None:
    config = build_app(PoolConfig(replica=ROUTED, surge=surge))._bound_deployment._deployment_config
    assert config.max_surge_percent == percent


@pytest.mark.parametrize(
    ("free", "options", "count"),
    [
        ([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 0.0, "GPU": 4.0}, {"CPU": 3.0}], {"num_cpus": 2, "num_gpus": 1}, 2),
        ([{"CPU": 1.0, "GPU": 1.0}], {"num_cpus": 0, "num_gpus": 0.5}, 2),
        ([{"CPU": 0.3}], {"num_cpus": 0.1, "num_gpus": 0}, 3),
        ([], {"num_cpus": 1, "num_gpus": 0}, 0),
        ([], {"num_cpus": 0, "num_gpus": 0}, float("inf")),
    ],
)
def test_places_are_counted_node_by_node(free: list[dict[str, float]], options: dict[str, Any], count: float) -> None:
    assert places(free, options) == count


def test_configs_travel_to_other_processes() -> None:
    config = PoolConfig(worker=WorkerConfig(device="cpu"), replica=ROUTED)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "Error:\nTraceback (most recent call last):\n  File x\nworker.errors.ModelLoadError: there is no abc\n",
            "there is no abc",
        ),
        ("ValueError: max_batch is 0, must be at least 1", "max_batch is 0, must be at least 1"),
        ("worker.errors.UnsafeCheckpoint: pickle files", "pickle files"),
        ("plain words", "plain words"),
        ("", "Ray Serve gave no reason"),
    ],
)
def test_the_cause_of_a_failed_start_is_one_sentence(message: str, cause: str) -> None:
    assert last_cause(message) == cause
