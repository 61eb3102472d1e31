"""The smallest possible proof that a machine can capture: one operation, replayed on two inputs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from worker.graphs.backend import CaptureBackend, backend_for
from worker.graphs.errors import GraphError
from worker.graphs.key import GraphKey
from worker.graphs.pool import GraphPool
from worker.graphs.recorder import GraphRecorder
from worker.graphs.region import CaptureRegion


@dataclass(frozen=True, slots=True)
class SmokeResult:
    """Whether one operation was captured and replayed correctly."""

    is_ok: bool
    seconds: float
    detail: str
    """What failed, with cause and remedy; empty if nothing did."""


def smoke_test(device: torch.device | str = "cuda", backend: CaptureBackend | None = None) -> SmokeResult:
    """Capture x + 1 and replay it on two values. Never raises a GraphError or a CUDA error: the result holds it."""
    started = time.perf_counter()
    try:
        detail = _capture_and_replay(backend or backend_for(device))
    except (GraphError, RuntimeError) as error:
        detail = str(error)
    return SmokeResult(not detail, time.perf_counter() - started, detail)


def _capture_and_replay(backend: CaptureBackend) -> str:
    pool = GraphPool(backend)
    recorder = GraphRecorder(pool)
    x = torch.zeros(1, device=backend.device)
    key = GraphKey("decode", 0, 1, "smoke")
    region = CaptureRegion(run=lambda: x + 1, inputs={"x": x})
    recorder.warm_up(key, region)
    graph = recorder.capture(key, region)
    try:
        for value in (1.0, 41.0):
            graph.load({"x": torch.tensor([value])})
            result = float(graph.replay().clone())
            if result != value + 1:
                return f"replaying x + 1 at {value} gave {result}"
    finally:
        recorder.release(graph)
        pool.close()
    return ""
