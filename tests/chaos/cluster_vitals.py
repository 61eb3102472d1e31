"""What the processes of a cluster hold: memory, descriptors, threads and tasks, read again and again over their lives."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import SystemRandom

import psutil

from tests.fakes.scrape import Scrape, fetch, parse

TITLES = {
    "ray::ServeReplica": "replica",
    "ray::ServeController": "Serve's controller",
    "ray::ProxyActor": "Serve's proxy",
    "gcs_server": "Ray's GCS",
    "raylet/raylet": "raylet",
}
"""By what the command line of a process of Ray has in it."""
NUM_PORTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Of one process at one time."""

    at_s: float
    """On time.monotonic."""
    rss: int
    """Bytes."""
    descriptors: int
    threads: int
    tasks: int | None = None
    """Of its event loop, where it has one that says so."""
    graph_steps: int = 0
    eager_steps: int = 0


@dataclass(slots=True, kw_only=True)
class Life:
    """A process and its readings, the first one first."""

    role: str
    process: psutil.Process
    readings: list[Reading] = field(default_factory=list)


def role_of(process: psutil.Process) -> str | None:
    """None for what has none, and for a process that is gone."""
    with contextlib.suppress(psutil.Error):
        line = " ".join(process.cmdline())
        return next((role for title, role in TITLES.items() if title in line), None)
    return None


def read(process: psutil.Process, ports: range) -> Reading:
    """Raises psutil.Error for a process that is gone. `ports` are those where processes of the pool have their metrics."""
    with process.oneshot():
        rss, descriptors, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
    metrics = _metrics(process, ports)
    return Reading(
        at_s=time.monotonic(),
        rss=rss,
        descriptors=descriptors,
        threads=threads,
        tasks=None if metrics is None else round(metrics.value("event_loop_tasks")),
        graph_steps=0 if metrics is None else round(metrics.value("steps_total", runner="graph")),
        eager_steps=0 if metrics is None else round(metrics.value("steps_total", runner="eager")),
    )


def _metrics(process: psutil.Process, ports: range) -> Scrape | None:
    listening = [
        connection.laddr.port for connection in process.net_connections("tcp") if connection.status == "LISTEN"
    ]
    port = next((port for port in listening if port in ports), None)
    with contextlib.suppress(OSError):
        return None if port is None else parse(fetch(f"127.0.0.1:{port}"))
    return None


def metrics_ports() -> range:
    """Ports next to each other that are free, below those that are given out to whoever asks for any."""
    for first in _candidates():
        with contextlib.suppress(OSError), contextlib.ExitStack() as taken:
            for port in range(first, first + NUM_PORTS):
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            return range(first, first + NUM_PORTS)
    raise OSError("no free ports for metrics")


def _candidates() -> Iterator[int]:
    for _ in range(20):
        yield SystemRandom().randrange(20_000, 30_000)


class Vitals:
    """Lives of processes, by process: an id that is used again is another life."""

    def __init__(self, ports: range) -> None:
        self.lives: dict[psutil.Process, Life] = {}
        self._ports = ports

    async def take(self, processes: Mapping[psutil.Process, str]) -> None:
        """One more reading of each of them that still lives; values are their roles."""
        for process, role in processes.items():
            with contextlib.suppress(psutil.Error):
                reading = await asyncio.to_thread(read, process, self._ports)
                life = self.lives.setdefault(process, Life(role=role, process=process))
                life.readings.append(reading)

    def of(self, role: str) -> list[Life]:
        """In the order in which they were first seen."""
        return [life for life in self.lives.values() if life.role == role]
