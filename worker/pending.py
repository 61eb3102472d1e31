"""A step that was launched and whose tokens are on their way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from worker.logprobs import logprob_of
from worker.request import Logprob
from worker.sampler import NUM_DETAILS, Sampled
from worker.sampling_needs import SampledRow
from worker.step_output import StepOutput


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
class SampledTokens:
    """Tokens of some rows that take the place of the likeliest ones, and what their log-probabilities are made of."""

    rows: tuple[int, ...]
    num_logprobs: tuple[int | None, ...]
    host: torch.Tensor
    """[sampled rows, 2] int64."""
    details: torch.Tensor
    """[sampled rows, NUM_DETAILS] int64; means nothing where no row asked for log-probabilities."""

    def put_into(self, pairs: list[list[int]], logprobs: list[Logprob | None]) -> None:
        """Overwrite the rows' entries."""
        for row, pair in zip(self.rows, self.host.tolist(), strict=True):
            pairs[row] = pair
        for number, (row, count) in enumerate(zip(self.rows, self.num_logprobs, strict=True)):
            if count is not None:
                logprobs[row] = logprob_of(self.details[number].tolist(), count)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose tokens are being copied to `host` [rows, 2] int64; `landed` is None where copies are immediate."""

    host: torch.Tensor
    landed: torch.cuda.Event | None
    runner: str
    sampled: SampledTokens | None = None

    def result(self) -> StepOutput:
        """See PendingStep."""
        if self.landed is not None:
            self.landed.synchronize()
        pairs: list[list[int]] = self.host.tolist()
        logprobs: list[Logprob | None] = [None] * len(pairs)
        if self.sampled is not None:
            self.sampled.put_into(pairs, logprobs)
        return StepOutput([token for token, _ in pairs], [bool(finite) for _, finite in pairs], logprobs, self.runner)


class TokenMailbox:
    """A ring of host buffers for the tokens of steps under way.

    `depth` steps may be unread at once; the buffer of the oldest is then used again. A step is `open`ed with the likeliest
    tokens, the sampled ones may be put on top, and then it is sent; the copies are queued on the current stream.
    """

    def __init__(self, *, max_rows: int, depth: int, device: torch.device) -> None:
        self._ring = [_Slot(max_rows, device) for _ in range(depth)]
        self._next = 0

    def open(self, packed: torch.Tensor, count: int) -> Letter:
        """Queue the copy of the first `count` rows behind the step."""
        slot, self._next = self._ring[self._next], (self._next + 1) % len(self._ring)
        slot.tokens[:count].copy_(packed[:count], non_blocking=True)
        return Letter(slot, count)


class _Slot:
    """Host memory for one step."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"

        def buffer(width: int) -> torch.Tensor:
            return torch.zeros((max_rows, width), dtype=torch.int64, pin_memory=is_cuda)

        self.tokens, self.sampled, self.details = buffer(2), buffer(2), buffer(NUM_DETAILS)
        self.landed = torch.cuda.Event() if is_cuda else None


class Letter:
    """A step being written to the mailbox."""

    def __init__(self, slot: _Slot, count: int) -> None:
        self._slot = slot
        self._count = count
        self._sampled: SampledTokens | None = None

    def overlay(self, rows: tuple[SampledRow, ...], sampled: Sampled) -> None:
        """Queue the copy of the tokens of `rows`, and of what log-probabilities are made of if any asked for them."""
        packed, details = sampled
        slot, count = self._slot, len(rows)
        slot.sampled[:count].copy_(packed[:count], non_blocking=True)
        wanted = tuple(row.sequence.request.sampling.logprobs for row in rows)
        if any(number is not None for number in wanted):
            slot.details[:count].copy_(details[:count], non_blocking=True)
        places = tuple(row.logits for row in rows)
        self._sampled = SampledTokens(places, wanted, slot.sampled[:count], slot.details[:count])

    def send(self, runner: str) -> LaunchedStep:
        """Everything is queued."""
        if self._slot.landed is not None:
            self._slot.landed.record()
        return LaunchedStep(self._slot.tokens[: self._count], self._slot.landed, runner, self._sampled)
