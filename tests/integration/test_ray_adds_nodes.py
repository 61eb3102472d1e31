"""A wish for more replicas becomes more nodes: Serve, Ray's real autoscaler, and a provider whose nodes are processes.

The node type is that of deploy/ray-up/aws.yaml. Everything runs on a machine of namespaces, where Ray's own commands, which
end every Ray that they see, see no other.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tests.fakes.command_line import ROOT
from tests.fakes.machines import Machine, machines, missing
from tests.fakes.ssh_machines import make_environment

PROBLEM = missing()
pytestmark = [
    pytest.mark.ray,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PROBLEM is not None, reason=f"no machine for Ray: {PROBLEM}"),
]

# Ray's provider for tests finds its head under this name.
HEAD_TYPE = "ray.head.default"
RAY_ENVIRONMENT = "source ~/graphpool/deploy/node/ray.env"
START = f"""
{RAY_ENVIRONMENT}
export RAY_FAKE_CLUSTER=1 AUTOSCALER_UPDATE_INTERVAL_S=1 RAY_enable_autoscaler_v2=0
ray start --head --port=6379 --dashboard-host=127.0.0.1 --num-cpus=0 --object-store-memory=83886080 --autoscaling-config=$HOME/cluster.json
"""
# Prints how many replicas are READY, and how many nodes with a GPU there are, for every line that it reads.
COUNT = """
import sys
import ray
from cluster.client import CallError, GraphpoolClient
from cluster.cli.load_table import READY
from load import config

ray.init(log_to_driver=False)
with GraphpoolClient("127.0.0.1:50050", config) as client:
    for _ in sys.stdin:
        try:
            ready = sum(load.state == READY for load in client.loads())
        except CallError:
            ready = 0
        nodes = sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU"))
        print(ready, nodes, flush=True)
"""
# Keeps more sequences going than one replica has rows, until it is killed.
LOAD = """
import threading
from pathlib import Path
from cluster.client import GraphpoolClient
from cluster.config import ClientConfig
from cluster.security.config import ClientSecurity

certs = Path.home() / "graphpool" / "certs"
security = ClientSecurity(
    tls_ca=str(certs / "ca.pem"), tls_cert=str(certs / "client.pem"), tls_key=str(certs / "client-key.pem")
)
config = ClientConfig(security=security)
def ask():
    with GraphpoolClient("127.0.0.1:50050", config) as client:
        while True:
            client.generate([1, 2, 3], max_tokens=200, ignore_eos=True)
if __name__ == "__main__":
    for _ in range(12):
        threading.Thread(target=ask).start()
"""


def cluster_config() -> dict[str, Any]:
    """The GPU workers of aws.yaml, from a provider that starts them here."""
    shipped = yaml.safe_load((ROOT / "deploy" / "ray-up" / "aws.yaml").read_text())
    gpu = {**shipped["available_node_types"]["gpu"], "min_workers": 0, "node_config": {}}
    gpu["resources"] = {**gpu["resources"], "object_store_memory": 80 * 2**20}
    empty: dict[str, list[str]] = {
        f"{part}_commands": [] for part in ("setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    }
    return {
        **{name: shipped[name] for name in ("cluster_name", "max_workers")},
        **empty,
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            **dict.fromkeys(("disable_node_updaters", "disable_launch_config_check"), True),
        },
        "available_node_types": {HEAD_TYPE: {"resources": {}, "node_config": {}, "max_workers": 0}, "gpu": gpu},
        "head_node_type": HEAD_TYPE,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.1,
        "auth": {},
        "docker": {},
        "initialization_commands": [],
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
    }


def serve_config(**changes: Any) -> dict[str, Any]:
    """cpu.yaml, whose replicas hold a GPU that they do not use."""
    values: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "serve" / "cpu.yaml").read_text())
    values["applications"][0]["args"].update(num_gpus=1, drain_timeout_s=10, **changes)
    return values


@dataclass(frozen=True, slots=True)
class Autoscaled:
    """The cluster."""

    machine: Machine
    counts: subprocess.Popen[str]
    """COUNT, once it is running."""

    def on_head(self, command: str) -> str:
        return self.machine.shell(f"{RAY_ENVIRONMENT}; {command}")

    def deploy(self, **changes: Any) -> None:
        (self.machine.home / "serve.yaml").write_text(yaml.safe_dump(serve_config(**changes)))
        self.on_head("serve deploy ~/serve.yaml")

    def wait_for(self, num_replicas: int) -> None:
        """Until so many replicas are READY on as many nodes."""
        give_up_s = time.monotonic() + 240
        while (found := self.ready_and_nodes()) != (num_replicas, num_replicas):
            assert time.monotonic() < give_up_s, f"{found}: {self.on_head('serve status')}"
            time.sleep(0.5)

    def ready_and_nodes(self) -> tuple[int, int]:
        """Replicas that are READY, and nodes with a GPU."""
        assert self.counts.stdin is not None
        assert self.counts.stdout is not None
        self.counts.stdin.write("\n")
        self.counts.stdin.flush()
        ready, nodes = self.counts.stdout.readline().split()
        return int(ready), int(nodes)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Autoscaled]:
    with machines(tmp_path_factory.mktemp("autoscaled"), "head") as (head,):
        make_environment(head)
        shutil.copytree(ROOT / "deploy", head.home / "graphpool" / "deploy")
        (head.home / ".ray").mkdir()
        (head.home / ".ray" / "auth_token").write_text("5" * 64)
        (head.home / "cluster.json").write_text(json.dumps(cluster_config()))
        (head.home / "load.py").write_text(LOAD)
        (head.home / "count.py").write_text(COUNT)
        head.shell("source ~/graphpool-env/bin/activate; graphpool certs init ~/graphpool/certs")
        head.shell(START, timeout_s=120)
        head.shell("bash ~/graphpool/deploy/node/router.sh start")
        counts = f"{RAY_ENVIRONMENT}; RAY_SCHEDULER_EVENTS=0 exec python count.py 2>/dev/null"
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(head.inside("bash", "-c", counts), **pipes) as process:
            autoscaled = Autoscaled(head, process)
            assert autoscaled.ready_and_nodes() == (0, 0)
            yield autoscaled


def test_nodes_come_with_the_wish_for_replicas_and_go_with_it(cluster: Autoscaled) -> None:
    for wanted in (1, 2, 1):
        cluster.deploy(num_replicas=wanted)
        cluster.wait_for(wanted)


def test_load_brings_a_node_and_its_end_takes_it_away(cluster: Autoscaled) -> None:
    cluster.deploy(scaling={"min_replicas": 1, "max_replicas": 2, "down_after_s": 10.0})
    cluster.wait_for(1)
    environment = "source ~/graphpool-env/bin/activate"
    load = subprocess.Popen(
        cluster.machine.inside("bash", "-c", f"{environment}; echo $$ >load.pid; exec python load.py")
    )
    cluster.wait_for(2)
    cluster.machine.shell("kill -9 $(cat load.pid)")
    load.wait(timeout=30)
    cluster.wait_for(1)
