"""Health as forward progress: is a step taking longer than it can?"""

from __future__ import annotations

from dataclasses import dataclass

from worker.errors import EngineStalled

MIN_STALL_S = 2.0
STALL_FACTOR = 4.0
FIRST_STEP_S = 30.0
"""Allowed while there is no step to predict from: first steps allocate, compile and page weights in."""


def allowed_step_s(predicted_s: float | None) -> float:
    """How long a step of this predicted duration may take before it counts as stalled; None or 0 = not known."""
    return max(MIN_STALL_S, STALL_FACTOR * predicted_s) if predicted_s else FIRST_STEP_S


@dataclass(slots=True)
class ProgressWatch:
    """Written by the engine's thread around each step, read by any other."""

    step_started_s: float | None = None
    allowed_s: float = FIRST_STEP_S
    is_preparing: bool = False
    """What runs is no step but a piece of preparation, such as capturing a graph."""

    def begin(self, now_s: float, predicted_s: float | None, *, is_preparing: bool = False) -> None:
        """A step starts. Without a prediction it may take FIRST_STEP_S."""
        self.allowed_s = allowed_step_s(predicted_s)
        self.is_preparing = is_preparing
        self.step_started_s = now_s

    def end(self) -> None:
        """The step is done."""
        self.step_started_s = None
        self.is_preparing = False

    def age_s(self, now_s: float) -> float:
        """How long the running step has been running; 0 = none is."""
        started_s = self.step_started_s
        return 0.0 if started_s is None else max(0.0, now_s - started_s)

    def check(self, now_s: float) -> None:
        """Raise EngineStalled when the running step is past its time."""
        age_s = self.age_s(now_s)
        if age_s > self.allowed_s:
            raise EngineStalled(f"a step runs for {age_s:.1f} s, {self.allowed_s:.1f} s are allowed")
