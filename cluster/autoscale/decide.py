"""The decision itself: pure functions of demand, of what was decided before, and of the time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.autoscale.config import ScalingConfig
from cluster.autoscale.demand import Demand

UNKNOWN_ROWS = 8
"""Taken for a replica's rows while none has said how many it has."""
MAX_GROWTH = 2.0
"""Waiting too long asks for at most so many times the replicas there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a decision leaves to the next."""

    needs: tuple[tuple[float, int], ...] = ()
    """(when, replicas needed): of the last down_after_s those that no later one exceeds, the largest first."""
    busy_s: float = 0.0
    """When there was any request last."""
    raised_s: float = -math.inf
    """When more replicas were asked for last."""


def decide(
    demand: Demand, current: int, memory: Memory | None, now_s: float, config: ScalingConfig
) -> tuple[int, Memory]:
    """Replicas to have from now on, where `current` have been asked for; None = nothing was decided before.

    The most that was needed at any time in the last `down_after_s`. So it goes up at once, and down only after load has
    been lower for that long: load that comes and goes within it changes nothing. Failure mode: the replicas of a peak are
    paid for `down_after_s` longer than they are needed.
    """
    if memory is None:
        # A pool that may be empty begins with one replica, which shows that its config is good for anything.
        memory = Memory(needs=((now_s, max(current, 1)),), busy_s=now_s)
    busy_s = now_s if demand.sequences else memory.busy_s
    needed = _bounded(replicas_needed(demand, current, memory, now_s, config), config)
    needs = _remember(memory.needs, now_s, needed, config)
    desired = needs[0][1]
    if config.min_replicas == 0 and desired <= 1 and now_s - busy_s >= config.to_zero_after_s:
        desired, needs = 0, ((now_s, 0),)
    raised_s = now_s if desired > current else memory.raised_s
    return desired, Memory(needs=needs, busy_s=busy_s, raised_s=raised_s)


def replicas_needed(demand: Demand, current: int, memory: Memory, now_s: float, config: ScalingConfig) -> int:
    """For this very demand: rows for all sequences, and more while those that come would wait for too long."""
    if not demand.sequences:
        return min(current, 1)
    by_rows = math.ceil(demand.sequences / (usable_rows(demand, config) * config.target_occupancy))
    return max(by_rows, _by_wait(demand, current, memory, now_s, config), 1)


def usable_rows(demand: Demand, config: ScalingConfig) -> int:
    """Sequences one replica may run and still keep the objective for the time between tokens.

    A step is taken to grow in proportion to its rows past the objective, which is more than it does.
    """
    rows = demand.max_rows or UNKNOWN_ROWS
    if config.target_token_s is None or demand.step_s <= config.target_token_s or not demand.num_ready:
        return rows
    rows_now = demand.running / demand.num_ready
    return max(1, min(rows, math.floor(rows_now * config.target_token_s / demand.step_s)))


def _by_wait(demand: Demand, current: int, memory: Memory, now_s: float, config: ScalingConfig) -> int:
    """More than there are, as much as the wait is too long; none while those asked for are still on their way."""
    are_coming = demand.num_ready < current and now_s - memory.raised_s < config.replica_start_s
    wait_s = max(demand.predicted_ttft_s, demand.queue_age_s)
    if are_coming or not (demand.waiting or demand.held) or wait_s <= config.target_ttft_s:
        return 0
    return max(current + 1, math.ceil(demand.num_ready * min(wait_s / config.target_ttft_s, MAX_GROWTH)))


def _remember(
    needs: tuple[tuple[float, int], ...], now_s: float, needed: int, config: ScalingConfig
) -> tuple[tuple[float, int], ...]:
    kept = [(when_s, need) for when_s, need in needs if now_s - when_s < config.down_after_s and need > needed]
    return (*kept, (now_s, needed))


def _bounded(count: int, config: ScalingConfig) -> int:
    return max(config.min_replicas, min(count, config.max_replicas))
