"""Whether a request is taken on at all: refused at once is better than answered too late."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.config import RouterConfig
from cluster.errors import Overloaded
from protos import control_pb2
from worker.forecast import predict_ttft_s
from worker.request import Criticality

SHARES = {
    Criticality.SHEDDABLE: 0.25,
    Criticality.SHEDDABLE_PLUS: 0.5,
    Criticality.CRITICAL: 0.9,
    Criticality.CRITICAL_PLUS: 1.0,
}
"""Of the queue, and of the time there is to wait, that each class may use: the lowest is refused first."""
STANDING_PART = 0.5
"""Of the time that a deadline leaves to wait: a queue that has stood for so long is held to it, too."""
LEARNING = 0.1
"""Weight of the newest answer in the mean length of answers."""
MIN_QUEUE_AGE_S = 0.3
"""What has waited for less may only have come a moment before the report."""
MIN_RETRY_S, MAX_RETRY_S = 0.1, 5.0
JITTER = 0.2


@dataclass(frozen=True, slots=True)
class Room:
    """One replica's rows and pace, as the router knows them at this moment."""

    max_rows: int
    """0 = not known."""
    num_inside: int
    """Sequences that hold a row or wait for one."""
    prefill_tokens: int = 0
    """Of prompts not computed yet."""
    prefill_token_s: float = 0.0
    step_s: float = 0.0

    @property
    def num_free_rows(self) -> int:
        """Sequences that could start now."""
        return max(0, self.max_rows - self.num_inside)

    @property
    def num_waiting(self) -> int:
        """Sequences without a row."""
        return max(0, self.num_inside - self.max_rows)

    def predict_s(self, num_sequences: int, answer_tokens: float) -> float:
        """To the first token of a newcomer with so many sequences, if answers are as long as `answer_tokens`."""
        return predict_ttft_s(
            num_ahead=self.num_waiting + num_sequences - 1,
            num_free_rows=self.num_free_rows,
            max_rows=self.max_rows,
            prefill_tokens=self.prefill_tokens,
            prefill_token_s=self.prefill_token_s,
            decode_step_s=self.step_s,
            answer_tokens=answer_tokens,
        )


def rows_of(load: control_pb2.Load) -> int:
    """Sequences a replica runs at once: those it has rows for, or those it runs while others wait for blocks."""
    if load.running and load.waiting and load.queue_age_s > MIN_QUEUE_AGE_S:
        return min(load.running, load.max_rows)
    return load.max_rows


def together(rooms: Sequence[Room], num_waiting: int) -> Room:
    """Several replicas as one whose rows are all held, with so many waiting in front of it; at least one."""
    max_rows = sum(room.max_rows for room in rooms)
    return Room(
        max_rows=max_rows,
        num_inside=max_rows + num_waiting,
        prefill_tokens=sum(room.prefill_tokens for room in rooms) // len(rooms),
        prefill_token_s=max(room.prefill_token_s for room in rooms),
        step_s=sum(room.step_s for room in rooms) / len(rooms),
    )


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs."""

    num_sequences: int
    time_left_s: float | None
    """Until its deadline; None = there is none."""
    answer_s: float
    """From its first token to its last, if it is like recent ones."""
    criticality: Criticality
    full_s: float = 0.0
    """For how long no row has been free."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may wait."""

    max_waiting: int
    """Sequences in the queue of one replica."""
    max_wait_s: float
    """For the first token of a request without a deadline."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken on: "queue_full" or "too_late"; and when there may be room for one like it."""

    reason: str
    retry_after_s: float


def judge(rooms: Sequence[Room], demand: Demand, limits: Limits, answer_tokens: float) -> Refusal | None:
    """None if some replica has room for the request and time for it; else why not.

    A replica with free rows takes anything: what is too slow even then is for the client to judge, and a prediction
    that is wrong is found out only by work. Else the request waits behind `num_waiting` others. Its first token has to
    come within its class's share of the time it can wait, and its last before its deadline. A burst may fill that time;
    a queue that stands would make every answer as late as can be, and late for any hiccup, and answer no more of them:
    it is held to a part. Cost model: see `worker.forecast`. Failure mode: the mean length of recent answers stands for
    that of all.
    """
    if any(room.max_rows == 0 or room.num_free_rows >= demand.num_sequences for room in rooms):
        return None
    share = SHARES[demand.criticality]
    waits = [room.predict_s(demand.num_sequences, answer_tokens) for room in rooms]
    limit = limits.max_waiting * share
    open_waits = [
        wait_s
        for room, wait_s in zip(rooms, waits, strict=True)
        if room.num_waiting + demand.num_sequences <= limit or room.num_waiting == 0
    ]
    budget_s = limits.max_wait_s
    if demand.time_left_s is not None:
        budget_s = min(budget_s, _patience_s(demand.time_left_s - demand.answer_s, demand.full_s))
    budget_s *= share
    if not open_waits:
        return Refusal("queue_full", min(waits))
    if min(open_waits) > budget_s:
        return Refusal("too_late", min(open_waits) - max(0.0, budget_s))
    return None


def _patience_s(spare_s: float, full_s: float) -> float:
    """The time to wait that a deadline leaves, or the part of it that a standing queue may take."""
    return STANDING_PART * spare_s if full_s > STANDING_PART * spare_s else spare_s


class Admission:
    """Judges requests by what the router knows of its replicas, and learns how long answers are."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        jitter: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = Limits(config.max_waiting, config.max_wait_s)
        self._clock = clock
        self._full_since_s: float | None = None
        self._jitter = jitter or (lambda: random.uniform(1 - JITTER, 1 + JITTER))  # noqa: S311
        self._answer_tokens = 0.0
        self.refusals: dict[tuple[str, Criticality], int] = {}
        """Requests not taken on, by reason and class."""

    @property
    def answer_tokens(self) -> float:
        """Recent mean length of answers; 0 before the first."""
        return self._answer_tokens

    def note_answer(self, num_tokens: int) -> None:
        """An answer is complete."""
        mean = self._answer_tokens
        self._answer_tokens = mean + LEARNING * (num_tokens - mean) if mean else float(num_tokens)

    def note_room(self) -> None:
        """A request found a free row."""
        self._full_since_s = None

    def check(
        self,
        rooms: Sequence[Room],
        *,
        num_sequences: int,
        max_tokens: int | None,
        time_left_s: float | None,
        criticality: Criticality,
    ) -> None:
        """Raise Overloaded if the request should not be taken on; with no replica there is nothing to judge."""
        if not rooms:
            return
        tokens = self._answer_tokens if max_tokens is None else min(max_tokens, self._answer_tokens)
        step_s = min(room.step_s for room in rooms)
        demand = Demand(num_sequences, time_left_s, tokens * step_s, criticality, self._full_s())
        refusal = judge(rooms, demand, self._limits, self._answer_tokens)
        if refusal is None:
            return
        key = refusal.reason, criticality
        self.refusals[key] = self.refusals.get(key, 0) + 1
        retry_after_s = min(max(refusal.retry_after_s, MIN_RETRY_S), MAX_RETRY_S) * self._jitter()
        raise Overloaded(refusal.reason, retry_after_s)

    def _full_s(self) -> float:
        now_s = self._clock()
        if self._full_since_s is None:
            self._full_since_s = now_s
        return now_s - self._full_since_s
