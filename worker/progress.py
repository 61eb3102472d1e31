"""Health as forward progress: is a step taking longer than it can?"""

from __future__ import annotations

from dataclasses import dataclass

from worker.errors import EngineStalled

MIN_STALL_S = 2.0
STALL_FACTOR = 4.0
FIRST_STEP_S = 30.0
"""Allowed while there is no step to predict from: first steps allocate, compile and page weights in."""


@dataclass(slots=True)
class ProgressWatch:
    """Written by the engine's thread around each step, read by any other."""

    step_started_s: float | None = None
    allowed_s: float = FIRST_STEP_S

    def begin(self, now_s: float, predicted_s: float | None) -> None:
        """A step starts. Without a prediction it may take FIRST_STEP_S."""
        self.allowed_s = FIRST_STEP_S if predicted_s is None else max(MIN_STALL_S, STALL_FACTOR * predicted_s)
        self.step_started_s = now_s

    def end(self) -> None:
        """The step is done."""
        self.step_started_s = None

    def check(self, now_s: float) -> None:
        """Raise EngineStalled when the running step is past its time."""
        started_s = self.step_started_s
        if started_s is not None and now_s - started_s > self.allowed_s:
            raise EngineStalled(f"a step runs for {now_s - started_s:.1f} s, {self.allowed_s:.1f} s are allowed")
