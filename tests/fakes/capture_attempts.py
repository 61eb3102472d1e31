"""Captures as tests make them: regions that change their mind, attempts, and whether the process is well afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from worker.graphs.key import GraphKey
from worker.graphs.recorder import GraphRecorder
from worker.graphs.region import CaptureRegion


class Switch:
    """Does one thing in warm-up and another at capture, as a region does that was not warmed up properly."""

    def __init__(self, warm: Callable[[], Any], capture: Callable[[], Any]) -> None:
        self.warm = warm
        self.capture = capture

    def __call__(self) -> Any:
        return self.capture() if torch.cuda.is_current_stream_capturing() else self.warm()


def attempt(recorder: GraphRecorder, run: Callable[[], Any], name: str = "attempt", **region: Any) -> Any:
    """Warm up without looking for traps, then capture: CUDA has the word."""
    key, built = GraphKey("decode", 0, 4, name), CaptureRegion(run=run, **region)
    recorder.warm_up(key, built, check=False)
    return recorder.capture(key, built)


def assert_the_process_is_well(recorder: GraphRecorder, x: Tensor) -> None:
    """Eager work, random numbers, pinned memory, old and new graphs of the same pool all work."""
    assert torch.rand(8, device="cuda").std() > 0
    assert torch.dropout(torch.ones(64, device="cuda"), 0.5, True).unique().tolist() == [0, 2]
    assert torch.empty(1000).pin_memory().is_pinned()
    torch.cuda.empty_cache()
    for number in range(3):
        graph = attempt(recorder, lambda: torch.relu(x) + 1 + torch.rand_like(x) * 0, f"after {number}")
        assert graph.replay().clone().tolist() == [2, 3, 4, 5]
