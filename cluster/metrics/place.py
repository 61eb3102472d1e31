"""What a replica is: which process, on which device, and how its start went."""

from __future__ import annotations

import os
from collections.abc import Iterator

from prometheus_client.core import Metric

from cluster.metrics.families import gauge, plain_gauge
from cluster.replica.start_times import StartTimes
from protos import replica_pb2


def place_families(hello: replica_pb2.ReplicaHello, times: StartTimes) -> Iterator[Metric]:
    """For a scrape."""
    labels = {
        "replica": hello.replica,
        "incarnation": hello.incarnation,
        "pid": str(os.getpid()),
        "device": hello.model.device,
        "gpu": hello.gpu,
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES", "all"),
    }
    yield gauge("replica_info", "Always 1.", [(tuple(labels.values()), 1)], tuple(labels))
    phases = (((phase,), seconds) for phase, seconds in times.phases.items())
    yield gauge(
        "start_seconds", "From the start of the process to the end of a phase of its start.", phases, ("phase",)
    )
    yield plain_gauge("start_time_seconds", "When the process started, in Unix time.", times.began_s)
