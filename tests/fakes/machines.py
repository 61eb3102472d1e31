"""Machines in namespaces of this one: each has a network, a process tree, a /tmp and a /home of its own, and shares the rest.

They hang on a bridge in a network of their own, so that nothing reaches the real one. A machine is gone with its first
process, and that one with the process that made it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.fakes.command_line import ROOT
from worker.model.cache import default_cache_dir

PREFIX = "198.51.100."
"""Of the network's addresses: a range for documentation, which is nobody's."""
USER, HOME = "ubuntu", Path("/home/ubuntu")
PASSWD = f"""{USER}:x:0:0::{HOME}:/bin/bash
root:x:0:0::{HOME}:/bin/bash
sshd:x:105:65534::/run/sshd:/usr/sbin/nologin
nobody:x:65534:65534::/:/bin/sh
"""
SHADOW = f"{USER}:*:20000:0:99999:7:::\nroot:*:20000:0:99999:7:::\n"
# The first process of a tree takes in orphans; a shell that waits also buries them.
FIRST_PROCESS = """
mount --make-rprivate / && mount --bind "$1/passwd" /etc/passwd && mount --bind "$1/shadow" /etc/shadow || exit 1
for path in "${@:3}"; do mount --bind "$path" "$1$path" || exit 1; done
mount --rbind "$1/home" /home && mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd && mount -t tmpfs tmpfs /dev/shm &&
hostname "$2" && ip link set lo up && mount --rbind "$1/tmp" /tmp && touch /home/ready || exit 1
while :; do sleep 60 & wait $!; done
"""
# Who answers does so at once, however busy the machine is: only silence takes the whole second.
SCAN = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
def takes(port):
    try:
        socket.create_connection((sys.argv[1], port), timeout=1).close()
    except OSError:
        return False
    return True
ports = [int(port) for port in sys.argv[2:]]
with ThreadPoolExecutor(16) as threads:
    print(*(port for port, is_open in zip(ports, threads.map(takes, ports)) if is_open))
"""
NAMESPACES = ("--net", "--pid", "--mount", "--uts", "--fork", "--kill-child=KILL", "--mount-proc")


def missing(*programs: str) -> str | None:
    """Why no machines with these programs can be had here; None if all is well."""
    if os.geteuid() != 0:
        return "needs root, to make namespaces"
    for name in ("unshare", "nsenter", "setpriv", "ip", *programs):
        if shutil.which(name) is None:
            return f"needs {name}"
    attempt = subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True, text=True)
    return f"namespaces cannot be made here: {attempt.stderr.strip()}" if attempt.returncode else None


@dataclass(frozen=True, slots=True)
class Machine:
    """One of them."""

    name: str
    address: str
    folder: Path
    """Holds its `home` and `tmp`, as seen from outside."""
    pid: int
    """Of its first process, as seen from outside."""

    @property
    def home(self) -> Path:
        """Its user's home, as seen from outside."""
        return self.folder / "home" / USER

    def inside(self, *command: str) -> list[str]:
        """The command line that runs `command` on it."""
        values = {"HOME": str(HOME), "USER": USER, "TERM": "dumb", "LC_ALL": "C.UTF-8", "PATH": os.environ["PATH"]}
        environment = ["env", "-i", "-C", str(HOME), *(f"{name}={value}" for name, value in values.items())]
        return ["nsenter", "-t", str(self.pid), "-n", "-p", "-m", "-u", *environment, *command]

    def run(self, *command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command on it to its end."""
        return subprocess.run(self.inside(*command), capture_output=True, text=True, timeout=timeout_s, check=False)

    def shell(self, script: str, timeout_s: float = 60.0) -> str:
        """What a shell script on it prints; the script must succeed."""
        done = self.run("bash", "-c", script, timeout_s=timeout_s)
        assert done.returncode == 0, f"on {self.name}: {script}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout

    def listening_ports(self) -> dict[int, bool]:
        """TCP ports that something on it listens on; True for those that are not on loopback alone."""
        found: dict[int, bool] = {}
        for line in self.shell("cat /proc/net/tcp /proc/net/tcp6").splitlines():
            _, local, _, state, *_ = line.split()
            if state != "0A":
                continue
            host, port = local.split(":")
            is_open = not host.endswith(("0100007F", "00000000000000000000000001000000"))
            found[int(port, 16)] = found.get(int(port, 16), False) or is_open
        return found

    def reachable_ports(self, address: str, ports: list[int]) -> set[int]:
        """Those of another machine's ports that take a connection from this one."""
        done = self.run(sys.executable, "-c", SCAN, address, *map(str, ports))
        assert done.returncode == 0, done.stderr
        return {int(port) for port in done.stdout.split()}


@contextlib.contextmanager
def machines(folder: Path, *names: str) -> Iterator[list[Machine]]:
    """So many machines on one network, for the length of a block."""
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_machine(folder / "switch", "switch", ""))
        switch.shell("ip link add br0 type bridge && ip link set br0 up")
        made = []
        for number, name in enumerate(names):
            machine = stack.enter_context(_machine(folder / name, name, f"{PREFIX}{10 + number}"))
            _connect(machine, switch, number)
            made.append(machine)
        yield made


@contextlib.contextmanager
def _machine(place: Path, name: str, address: str) -> Iterator[Machine]:
    (place / "tmp").mkdir(parents=True)
    (place / "home" / USER).mkdir(parents=True)
    (place / "passwd").write_text(PASSWD)
    (place / "shadow").write_text(SHADOW)
    kept = _kept_paths()
    for path in kept:
        Path(f"{place}{path}").mkdir(parents=True, exist_ok=True)
    command = ["unshare", *NAMESPACES, "bash", "-c", FIRST_PROCESS, "first", str(place), name, *kept]
    process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command])
    try:
        give_up_s = time.monotonic() + 10
        while not (place / "home" / "ready").exists():
            assert process.poll() is None, f"{name} did not start"
            assert time.monotonic() < give_up_s, f"{name} takes too long to start"
            time.sleep(0.02)
        yield Machine(name, address, place, psutil.Process(process.pid).children()[0].pid)
    finally:
        # Takes every process of the tree along.
        process.kill()
        process.wait()


def _kept_paths() -> list[str]:
    """What must be found on a machine although its own /tmp and /home hide it.

    That is this checkout, this environment with the Python it was made of, and the models of whoever runs the tests.
    """
    cache = default_cache_dir().absolute()
    cache.mkdir(parents=True, exist_ok=True)
    needed = {ROOT, Path(sys.prefix), Path(sys.base_prefix), cache}
    return sorted(str(path) for path in needed if path.parts[1] in ("tmp", "home"))


def _connect(machine: Machine, switch: Machine, number: int) -> None:
    link = ["ip", "link", "add", "eth0", "netns", str(machine.pid), "type", "veth"]
    subprocess.run([*link, "peer", "name", f"port{number}", "netns", str(switch.pid)], check=True)
    switch.shell(f"ip link set port{number} master br0 up")
    # Ray finds a node's own address by looking at where the rest of the world would be.
    machine.shell(
        f"ip addr add {machine.address}/24 dev eth0 && ip link set eth0 up && ip route add default via {PREFIX}254"
    )
