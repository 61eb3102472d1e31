"""A step that was launched and whose tokens are on their way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from worker.chooser import StepOutput


class PendingStep(Protocol):
    """What a runner gives back for a launched step."""

    def result(self) -> StepOutput:
        """The tokens; waits for this step only."""


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step whose tokens are known already."""

    output: StepOutput

    def result(self) -> StepOutput:
        """See PendingStep."""
        return self.output


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose tokens are being copied to `host` [rows, 2] int64; `landed` is None where copies are immediate."""

    host: torch.Tensor
    landed: torch.cuda.Event | None
    runner: str

    def result(self) -> StepOutput:
        """See PendingStep."""
        if self.landed is not None:
            self.landed.synchronize()
        pairs = self.host.tolist()
        return StepOutput(
            [token for token, _ in pairs], [bool(finite) for _, finite in pairs], [None] * len(pairs), self.runner
        )


class TokenMailbox:
    """A ring of host buffers for the tokens of steps under way.

    `depth` steps may be unread at once; the buffer of the oldest is then used again.
    """

    def __init__(self, *, max_rows: int, depth: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        shape = (max_rows, 2)
        self._ring = [torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda) for _ in range(depth)]
        self._events = [torch.cuda.Event() if is_cuda else None for _ in range(depth)]
        self._next = 0

    def send(self, packed: torch.Tensor, count: int, runner: str) -> LaunchedStep:
        """Queue the copy of the first `count` rows behind the step, on the current stream."""
        place, self._next = self._next, (self._next + 1) % len(self._ring)
        host, landed = self._ring[place][:count], self._events[place]
        host.copy_(packed[:count], non_blocking=True)
        if landed is not None:
            landed.record()
        return LaunchedStep(host, landed, runner)
