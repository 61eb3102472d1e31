"""Who reaches what, from another machine: of our listeners the router alone, and of Ray's none behind the shipped rules."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.command_line import ROOT
from tests.fakes.machines import PREFIX, Machine, machines, missing
from tests.fakes.ssh_machines import make_environment

RULES = ROOT / "deploy" / "firewall" / "graphpool.nft"
SSH, ROUTER, GCS, DASHBOARD, CLIENT, WORKER_PORT = 22, 50050, 6379, 8265, 10001, 10002
PORTS = [SSH, ROUTER, GCS, DASHBOARD, CLIENT, WORKER_PORT]
LISTEN = """
import socket, sys
sockets = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
print("listening", flush=True)
sys.stdin.read()
"""
PROBLEM = missing()
WITHOUT_NFT = missing("nft")
pytestmark = pytest.mark.skipif(PROBLEM is not None, reason=f"no second machine: {PROBLEM}")


def rules_for(nodes: list[Machine], outsiders: str) -> str:
    """The shipped rules with this network's addresses."""
    text = re.sub(
        r"define nodes = .*", f"define nodes = {{ {', '.join(node.address for node in nodes)} }}", RULES.read_text()
    )
    return re.sub(r"define (operators|clients) = .*", rf"define \1 = {{ {outsiders} }}", text)


def apply(machine: Machine, rules: str) -> None:
    (machine.folder / "tmp" / "rules.nft").write_text(rules)
    machine.shell("nft -c -f /tmp/rules.nft && nft -f /tmp/rules.nft")


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[tuple[Machine, Machine, Machine]]:
    """A head that listens on ports like Ray's, a worker node, and a machine that is no node."""
    with machines(tmp_path, "head", "worker", "outsider") as (head, worker, outsider):
        listener = subprocess.Popen(
            head.inside(sys.executable, "-c", LISTEN, *map(str, PORTS)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listening\n"
        yield head, worker, outsider
        listener.communicate()


@pytest.mark.skipif(WITHOUT_NFT is not None, reason=f"no firewall: {WITHOUT_NFT}")
def test_the_rules_close_everything_but_ssh_and_the_router(trio: tuple[Machine, Machine, Machine]) -> None:
    head, worker, outsider = trio
    assert outsider.reachable_ports(head.address, PORTS) == set(PORTS)
    apply(head, rules_for([head, worker], f"{PREFIX}0/24"))
    assert outsider.reachable_ports(head.address, PORTS) == {SSH, ROUTER}
    assert worker.reachable_ports(head.address, PORTS) == set(PORTS)
    assert head.reachable_ports("127.0.0.1", PORTS) == set(PORTS)


@pytest.mark.skipif(WITHOUT_NFT is not None, reason=f"no firewall: {WITHOUT_NFT}")
def test_those_who_are_no_operators_and_no_clients_reach_nothing(trio: tuple[Machine, Machine, Machine]) -> None:
    head, worker, outsider = trio
    apply(head, rules_for([head, worker], "10.0.0.0/8"))
    assert outsider.reachable_ports(head.address, PORTS) == set()


@pytest.mark.skipif(WITHOUT_NFT is not None, reason=f"no firewall: {WITHOUT_NFT}")
def test_the_rules_can_be_applied_again_and_taken_away(trio: tuple[Machine, Machine, Machine]) -> None:
    head, worker, outsider = trio
    for outsiders in ("10.0.0.0/8", f"{PREFIX}0/24"):
        apply(head, rules_for([head, worker], outsiders))
    assert outsider.reachable_ports(head.address, PORTS) == {SSH, ROUTER}
    head.shell("nft delete table inet graphpool")
    assert outsider.reachable_ports(head.address, PORTS) == set(PORTS)


@pytest.mark.model
@pytest.mark.slow
def test_without_a_firewall_the_router_alone_of_our_listeners_answers(tmp_path: Path) -> None:
    with machines(tmp_path, "server", "outsider") as (server, outsider):
        make_environment(server)
        command = "source ~/graphpool-env/bin/activate; exec graphpool"
        server.shell(f"{command} certs init ~/certs --host {server.address}")
        tls = "--tls-cert ~/certs/pool.pem --tls-key ~/certs/pool-key.pem --tls-ca ~/certs/ca.pem"
        replica = f"{command} worker --port 50051 --metrics-port 9091 --max-model-len 256 --threads 1"
        router = f"{command} router --host 0.0.0.0 --replica 127.0.0.1:50051 {tls}"
        started = [subprocess.Popen(server.inside("bash", "-c", one)) for one in (replica, router)]
        expected = {50050: True, 50051: False, 9091: False}
        give_up_s = time.monotonic() + 60
        while server.listening_ports() != expected:
            assert time.monotonic() < give_up_s, server.listening_ports()
            assert [one.poll() for one in started] == [None, None]
            time.sleep(0.5)
        assert outsider.reachable_ports(server.address, list(expected)) == {50050}
    for one in started:
        one.wait(timeout=30)
