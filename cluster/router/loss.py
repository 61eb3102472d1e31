"""What the loss of a replica says of the requests that were on it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Protocol

import grpc

from protos import replica_pb2

STALLED_S = 1.0
"""A failed replica whose last report was of a step this old did not crash: the step did not end."""
DATA_LOSS: int = grpc.StatusCode.DATA_LOSS.value[0]


class LossKind(enum.Enum):
    """How a replica was lost."""

    CRASHED = "crashed"
    """Its connection broke, or it said itself that its engine is over: something in its last step may have ended it."""
    STALLED = "stalled"
    """It lives, but its step does not end: a request may be the cause, or the machine."""
    SILENT = "silent"
    """Nothing came over a connection that stands: paused or cut off, which no request brings about."""
    UNSOUND = "unsound"
    """It found its own memory changed, which no request brings about either."""


class Verdict(enum.Enum):
    """What a loss makes of one request."""

    INNOCENT = "innocent"
    SUSPECT = "suspect"
    """It may have been in the step that ended the replica."""
    STALLED_ALONE = "stalled alone"
    """The step that did not end was its own and nobody else's."""
    GUILTY = "guilty"
    """It ended the replica: nothing else was in the step."""


class Witnessed(Protocol):
    """What is known of a request on the replica."""

    is_scheduled: bool
    """It has left the queue."""
    is_on_trial: bool
    """Steps compute it and nothing else."""


HOW = {
    LossKind.CRASHED: "it crashed",
    LossKind.STALLED: "a step did not end",
    LossKind.UNSOUND: "its weights had changed in memory",
}
"""Why a process ended, in words; one that fell silent may live."""


def how_it_failed(last_words: Iterable[replica_pb2.StreamEvent], *, step_age_s: float, code: int = 0) -> LossKind:
    """How a replica was lost that said itself that it is over, by the status it failed with and how it ended its requests."""
    if code == DATA_LOSS or any(event.error.code == DATA_LOSS for event in last_words):
        return LossKind.UNSOUND
    return LossKind.STALLED if step_age_s > STALLED_S else LossKind.CRASHED


def judge(streams: Sequence[Witnessed], kind: LossKind, *, max_rows: int) -> list[Verdict]:
    """A verdict for each of the requests that were on a lost replica, given in the order of their arrival there.

    Whoever was on trial was alone: a crash proves it, and clears all others. Without a trial those are suspects that
    were in steps. That a request left the queue is told with the next frame, so the news may have died with the
    replica; since the queue is first come, first served, only the oldest that are not known to have left it can be
    meant, and no more of them than there were rows for. `max_rows` 0 = not known: then all.
    """
    if kind in (LossKind.SILENT, LossKind.UNSOUND):
        return [Verdict.INNOCENT] * len(streams)
    if any(stream.is_on_trial for stream in streams):
        alone = Verdict.GUILTY if kind is LossKind.CRASHED else Verdict.STALLED_ALONE
        return [alone if stream.is_on_trial else Verdict.INNOCENT for stream in streams]
    num_scheduled = sum(stream.is_scheduled for stream in streams)
    num_unknown = len(streams) - num_scheduled if max_rows == 0 else max(max_rows - num_scheduled, 0)
    verdicts: list[Verdict] = []
    for stream in streams:
        if not stream.is_scheduled:
            num_unknown -= 1
        verdicts.append(Verdict.SUSPECT if stream.is_scheduled or num_unknown >= 0 else Verdict.INNOCENT)
    return verdicts


def trial_shares(num_suspects: int) -> list[float]:
    """How trials share their time, likeliest cause first: the second gets half of what the first gets, the third a third.

    A request that ends replicas seldom gets old, so it is the youngest that are worth a long look.
    """
    whole = sum(1 / place for place in range(1, num_suspects + 1))
    return [1 / place / whole for place in range(1, num_suspects + 1)]
