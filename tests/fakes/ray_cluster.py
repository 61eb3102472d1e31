"""A Ray cluster of several nodes on this machine, each of which can be killed; nothing but Ray's daemons is simulated.

Needs `ray.cluster_utils`, which comes with Ray but is not of its public interface: `missing` says why it cannot be used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from cluster.private_ray import OBJECT_STORE_BYTES, PrivateRay  # first: it sets what gRPC reads when it is imported

import psutil  # isort: skip

DEAD_NODE = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
"""When the head gives a node up. By Ray's defaults after 13 s, for which Serve goes on placing replicas there.

Where processes are dead, checks fail at once; the timeout is for those of a busy machine.
"""
PATIENT = {**DEAD_NODE, "health_check_timeout_ms": 30_000}
"""Where no node is to be lost, however busy the machine is with other things."""
NODE: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}


def missing() -> str | None:
    """Why there can be no such cluster here; None when there can."""
    try:
        import ray.cluster_utils  # noqa: F401
    except ImportError as error:
        return f"ray.cluster_utils cannot be imported: {error}"
    free = psutil.virtual_memory().available
    return None if free > 3 << 30 else f"three nodes and their replicas take 3 GiB, {free / 2**30:.1f} GiB are free"


class RayCluster(PrivateRay):
    """A head without room for replicas, and `num_nodes` more. What its GCS knows outlives it, in a file.

    All methods that touch Ray block, and run through `call`.
    """

    def __init__(self, *, num_nodes: int = 2, dead_node: Mapping[str, int] = DEAD_NODE) -> None:
        super().__init__(num_cpus=0)
        self._num_nodes = num_nodes
        self._dead_node = dead_node
        self._cluster: Any = None

    def add_node(self) -> None:
        """One more; returns when the head knows it."""
        with _without_hooks():
            self._cluster.add_node(num_cpus=2, **NODE)
        self._census.observe()

    def replicas_of_nodes(self) -> list[int]:
        """Serve's replicas on each node, the fullest one first."""
        return sorted((len(_replicas(node)) for node in self._cluster.worker_nodes), reverse=True)

    def kill_fullest_node(self) -> int:
        """SIGKILL to every process of the node that has most replicas, as if its power went; how many those were."""
        node = max(self._cluster.worker_nodes, key=lambda one: len(_replicas(one)))
        num_replicas = len(_replicas(node))
        raylet = _process(node, "raylet")
        for process in (raylet, *raylet.children(recursive=True)):
            _kill(process)
        self._cluster.remove_node(node, allow_graceful=False)
        return num_replicas

    def kill_replica(self) -> int:
        """SIGKILL to one replica on the fullest node; how many those were."""
        node = max(self._cluster.worker_nodes, key=lambda one: len(_replicas(one)))
        _kill(_replicas(node)[0])
        return 1

    def controller(self) -> psutil.Process | None:
        """Serve's, while there is one."""
        found = _named(self._cluster.head_node, "ray::ServeController")
        return found[0] if found else None

    def kill_gcs(self) -> None:
        """What every node and Serve report to is gone."""
        self._cluster.head_node.kill_gcs_server()

    def start_gcs(self) -> None:
        """At the same address, with what the last one wrote down. Returns when it answers."""
        self._cluster.head_node.start_gcs_server()
        self._cluster.head_node.get_gcs_client().internal_kv_keys(b"", None, timeout=60)
        self._census.observe()

    def _init(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        folder = Path(str(self._folder))
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        ray._private.worker._worker_logs_enabled = False
        config = {**self._dead_node, "gcs_storage": "rocksdb", "gcs_storage_path": str(folder / "gcs")}
        head = {
            **NODE,
            "num_cpus": 0,
            "temp_dir": str(folder),
            "gcs_server_port": _free_port(),
            "_system_config": config,
        }
        with _address_file_in(folder), _without_hooks():
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(self._num_nodes):
            self.add_node()
        ray.init(
            address=self._cluster.address,
            namespace="graphpool",
            log_to_driver=False,
            logging_level=logging.ERROR,
        )

    def _shutdown(self) -> None:
        import ray

        ray.shutdown()
        for node in self._cluster.list_all_nodes() if self._cluster else ():
            node.kill_all_processes(check_alive=False, allow_graceful=False)


@contextlib.contextmanager
def _address_file_in(folder: Path) -> Iterator[None]:
    """Ray writes down where a new cluster is for others to find: nobody is to find this one."""
    (folder / "ray").mkdir()
    before = os.environ.get("RAY_TMPDIR")
    os.environ["RAY_TMPDIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["RAY_TMPDIR"]
        else:
            os.environ["RAY_TMPDIR"] = before


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    """Ray would end its nodes by a handler of SIGTERM, which only the main thread may set.

    The kernel ends them with the thread that started them.
    """
    from ray._private.node import Node

    with mock.patch.object(Node, "_register_shutdown_hooks"):
        yield


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _replicas(node: Any) -> list[psutil.Process]:
    return _named(node, "ray::ServeReplica")


def _named(node: Any, title: str) -> list[psutil.Process]:
    return [process for process in _process(node, "raylet").children() if _title(process).startswith(title)]


def _process(node: Any, kind: str) -> psutil.Process:
    return psutil.Process(node.all_processes[kind][0].process.pid)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill()
