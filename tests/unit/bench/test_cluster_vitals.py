"""Reading what processes hold."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from prometheus_client.core import Metric

from cluster.metrics.exporter import MetricsExporter
from cluster.metrics.families import counter
from tests.chaos.cluster_vitals import Vitals, metrics_ports, read, role_of


def steps() -> Iterator[Metric]:
    yield counter("steps", "Steps.", ((("graph",), 7), (("eager",), 3)), ("runner",))


async def test_a_process_tells_its_memory_descriptors_threads_and_through_its_metrics_its_tasks() -> None:
    ports = metrics_ports()
    metrics = MetricsExporter(f"127.0.0.1:{ports[2]}", steps)
    metrics.start()
    tasks = [asyncio.create_task(asyncio.sleep(60)) for _ in range(5)]
    reading = await asyncio.to_thread(read, psutil.Process(), ports)
    assert reading.rss > 10 << 20
    assert min(reading.descriptors, reading.threads) > 1
    assert reading.tasks is not None
    assert reading.tasks > len(tasks)
    assert (reading.graph_steps, reading.eager_steps) == (7, 3)
    for task in tasks:
        task.cancel()
    await metrics.stop()


def test_a_process_without_metrics_has_no_tasks() -> None:
    assert read(psutil.Process(), range(0)).tasks is None


@pytest.fixture
def replica() -> Iterator[psutil.Popen]:
    with psutil.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", "ray::ServeReplica:graphpool:replica"],
        stdout=subprocess.DEVNULL,
    ) as process:
        yield process
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


async def test_the_life_of_a_process_is_kept_when_it_is_gone(replica: psutil.Popen) -> None:
    assert role_of(replica) == "replica"
    vitals = Vitals(range(0))
    await vitals.take({replica: "replica", psutil.Process(): "router"})
    replica.kill()
    replica.wait()
    await vitals.take({replica: "replica", psutil.Process(): "router"})
    assert [len(life.readings) for life in (*vitals.of("replica"), *vitals.of("router"))] == [1, 2]
    assert role_of(replica) is None


def test_other_processes_have_no_role() -> None:
    assert role_of(psutil.Process()) is None
