"""A real `ray up` of deploy/ray-up/on-premises.yaml: SSH, Ray and the firewall, on three machines made of namespaces."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.machines import Machine, machines, missing
from tests.fakes.ssh_machines import generate_key, make_checkout, make_environment, start_sshd

PROBLEM = missing("sshd", "ssh", "ssh-keygen", "rsync", "nft")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PROBLEM is not None, reason=f"no machines for ray up: {PROBLEM}"),
]

CLUSTER_FILE = "deploy/ray-up/on-premises.yaml"
ROUTER_PORT, METRICS_PORT, SSH_PORT = 50050, 9090, 22
CERTS = "--tls-ca ~/graphpool-certs/ca.pem --tls-cert ~/graphpool-certs/client.pem --tls-key ~/graphpool-certs/client-key.pem"


@dataclass(slots=True)
class Cluster:
    """What the operator's `ray up` made."""

    head: Machine
    worker: Machine
    operator: Machine
    """Runs `ray up`, and is no node: to the firewall it is anybody."""
    said: str = ""
    """By `ray up`."""

    def operate(self, command: str, timeout_s: float = 120.0) -> str:
        """Run a command of the documentation as the operator would."""
        return self.operator.shell(f"source ~/graphpool-env/bin/activate && cd ~/checkout && {command} 2>&1", timeout_s)

    def on_head(self, command: str, timeout_s: float = 60.0) -> str:
        """The same through `ray exec`."""
        return self.operate(f"ray exec {CLUSTER_FILE} 'source ~/graphpool/deploy/node/ray.env && {command}'", timeout_s)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Fill in what a file of deploy/ asks to be changed."""
    values = yaml.safe_load(path.read_text())
    change(values)
    path.write_text(yaml.safe_dump(values, sort_keys=False))


def is_ready(cluster: Cluster, address: str) -> bool:
    """Whether the router has a replica that is READY, as a person would see."""
    command = f"source ~/graphpool-env/bin/activate; graphpool status --address {address} {CERTS}"
    return cluster.operator.run("bash", "-c", command).returncode == 0


def until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_s, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(2)


def close(machine: Machine, nodes: tuple[Machine, ...], rules: str) -> None:
    """Apply deploy/firewall/graphpool.nft with this cluster's addresses."""
    addresses = ", ".join(node.address for node in nodes)
    rules = re.sub(r"define nodes = .*", f"define nodes = {{ {addresses} }}", rules)
    rules = re.sub(r"define (operators|clients) = .*", r"define \1 = { 198.51.100.0/24 }", rules)
    (machine.folder / "tmp" / "graphpool.nft").write_text(rules)
    machine.shell("nft -f /tmp/graphpool.nft")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with machines(tmp_path_factory.mktemp("machines"), "head", "worker", "operator") as (head, worker, operator):
        key = operator.home / ".ssh" / "graphpool"
        generate_key(key)
        checkout = make_checkout(operator)
        make_environment(operator)
        for node in (head, worker):
            make_environment(node)
            start_sshd(node, key)
            close(node, (head, worker), (checkout / "deploy" / "firewall" / "graphpool.nft").read_text())

        def fill_in(values: dict[str, Any]) -> None:
            values["provider"].update(head_ip=head.address, worker_ips=[worker.address])
            values.update(min_workers=1, max_workers=1)

        rewrite(checkout / CLUSTER_FILE, fill_in)
        made = Cluster(head, worker, operator)
        made.operate(f"graphpool certs init ~/graphpool-certs --host {head.address}")
        made.said = made.operate(f"ray up -y {CLUSTER_FILE}", timeout_s=400)
        yield made


def generate(cluster: Cluster, address: str) -> str:
    return cluster.operate(f"graphpool generate --address {address} {CERTS} --token-ids 1,2,3 --max-tokens 5 --json")


def replica_addresses(cluster: Cluster, address: str) -> set[str]:
    """Of the replicas that are READY."""
    pool = json.loads(cluster.operate(f"graphpool status --address {address} {CERTS} --json || true"))
    return {one["address"] for one in pool["replicas"] if str(one["state"]).endswith("READY")}


@pytest.fixture(scope="module")
def address(cluster: Cluster) -> str:
    """Of the router, once the pool is up."""
    found = f"{cluster.head.address}:{ROUTER_PORT}"
    until(lambda: "2 local.cluster.node" in cluster.on_head("ray status"), "the worker node", 240)
    cluster.on_head("serve deploy ~/graphpool/deploy/serve/cpu.yaml")
    until(lambda: is_ready(cluster, found), "a replica", 240)
    return found


def test_ray_up_shows_the_health_of_the_node(cluster: Cluster) -> None:
    assert re.search(r"graph capture\s+ok", cluster.said)
    assert re.search(r"ray\s+ok\s+2\.", cluster.said)


def test_a_generation_comes_from_the_worker_node_through_the_router_on_the_head(cluster: Cluster, address: str) -> None:
    status = cluster.operate(f"graphpool status --address {address} {CERTS} --json")
    assert cluster.worker.address in status
    assert '"completion_tokens": 5' in generate(cluster, address)


def test_a_caller_without_a_certificate_is_refused(cluster: Cluster, address: str) -> None:
    command = f"source ~/graphpool-env/bin/activate; graphpool status --address {address}"
    assert cluster.operator.run("bash", "-c", command).returncode == 1


def test_outsiders_reach_ssh_and_the_router_only(cluster: Cluster, address: str) -> None:
    for node, expected in ((cluster.head, {SSH_PORT, ROUTER_PORT}), (cluster.worker, {SSH_PORT})):
        ports = node.listening_ports()
        assert sum(ports.values()) > len(expected) + 3, "Ray listens on many ports"
        assert cluster.operator.reachable_ports(node.address, list(ports)) == expected


def test_the_nodes_reach_each_other(cluster: Cluster, address: str) -> None:
    open_ports = [port for port, is_open in cluster.head.listening_ports().items() if is_open]
    assert {6379, ROUTER_PORT} <= cluster.worker.reachable_ports(cluster.head.address, open_ports)


def test_the_dashboard_is_on_loopback_and_asks_for_the_token(cluster: Cluster) -> None:
    assert cluster.head.listening_ports()[8265] is False
    ask = "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8265/api/serve/applications/"
    assert cluster.head.shell(ask) == "401"
    assert cluster.head.shell(f'{ask} -H "Authorization: Bearer $(cat ~/.ray/auth_token)"') == "200"


def test_nobody_else_on_a_node_reads_the_token(cluster: Cluster, address: str) -> None:
    for node in (cluster.head, cluster.worker):
        assert (node.home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


def test_a_router_that_dies_is_back_and_finds_its_replicas(cluster: Cluster, address: str) -> None:
    cluster.head.shell("kill -9 $(pgrep -P $(cat ~/graphpool-router.pid))")
    until(lambda: is_ready(cluster, address), "the router", 90)


def test_a_changed_serve_config_replaces_the_replicas(cluster: Cluster, address: str) -> None:
    before = replica_addresses(cluster, address)
    cluster.on_head("sed -i s/max_batch:.8/max_batch:\\ 4/ ~/graphpool/deploy/serve/cpu.yaml")
    cluster.on_head("serve deploy ~/graphpool/deploy/serve/cpu.yaml")
    until(lambda: bool(now := replica_addresses(cluster, address)) and not now & before, "a new replica", 240)
    assert '"completion_tokens": 5' in generate(cluster, address)


def test_ray_up_again_takes_what_has_changed_to_every_node(cluster: Cluster, address: str) -> None:
    with (cluster.operator.home / "checkout" / "deploy" / "node" / "ray.env").open("a") as file:
        file.write("export GRAPHPOOL_TEST_VERSION=2\n")
    cluster.operate(f"ray up -y {CLUSTER_FILE}", timeout_s=400)
    until(lambda: "2 local.cluster.node" in cluster.on_head("ray status"), "the worker node", 240)
    assert "VERSION=2" in (cluster.worker.home / "graphpool" / "deploy" / "node" / "ray.env").read_text()
    cluster.on_head("serve deploy ~/graphpool/deploy/serve/cpu.yaml")
    until(lambda: is_ready(cluster, address), "a replica", 240)
    assert '"completion_tokens": 5' in generate(cluster, address)


def test_ray_down_ends_ray_on_every_node(cluster: Cluster, address: str) -> None:
    cluster.on_head("bash ~/graphpool/deploy/node/router.sh stop")
    cluster.operate(f"ray down -y {CLUSTER_FILE}")
    until(lambda: set(cluster.head.listening_ports()) == {SSH_PORT}, "the head", 90)
    # `ray down` leaves the workers of a local provider to find out for themselves.
    until(lambda: not cluster.worker.run("pgrep", "-x", "raylet").stdout, "the worker", 240)
