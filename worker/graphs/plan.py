"""In which order to capture, and what to leave out. Pure: neither torch nor a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from worker.graphs.key import GraphKey, Phase

MAX_KEYS = 88
"""Each graph costs a fraction of a second and some megabytes: more shapes than this are not worth it."""

SizeOf = Callable[[GraphKey], int]
"""Memory that a key's graph will need, in any unit; only the order counts."""


@dataclass(frozen=True, slots=True)
class DroppedKey:
    """A key that will not be captured, and why."""

    key: GraphKey
    reason: str


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Keys in capture order, and those left out."""

    keys: tuple[GraphKey, ...]
    dropped: tuple[DroppedKey, ...] = ()


def enumerate_keys(
    *,
    tiers: Sequence[int],
    decode_buckets: Sequence[int],
    prefill_buckets: Sequence[int] = (),
    variants: Sequence[str] = ("default",),
) -> tuple[GraphKey, ...]:
    """Every combination: decode and prefill buckets of each tier and variant. Raises ValueError on unsorted tables."""
    for name, table in (("tiers", tiers), ("decode_buckets", decode_buckets), ("prefill_buckets", prefill_buckets)):
        if list(table) != sorted(set(table)):
            raise ValueError(f"{name} must be sorted and unique, got {list(table)}")
    phases: tuple[tuple[Phase, Sequence[int]], ...] = (("decode", decode_buckets), ("prefill", prefill_buckets))
    return tuple(
        GraphKey(phase, tier, bucket, variant)
        for phase, buckets in phases
        for tier, bucket, variant in product(tiers, buckets, variants)
    )


def size_by_shape(key: GraphKey) -> int:
    """Default order of sizes: by bucket, then by tier."""
    return key.bucket * (1 << 32) + key.tier


def plan_captures(
    keys: Iterable[GraphKey], *, max_keys: int = MAX_KEYS, size_of: SizeOf = size_by_shape
) -> CapturePlan:
    """Order `keys`: the largest of each phase first, so that the pool gets its size once; then the most useful first.

    Useful means small: bucket 1 of the smallest tier serves the first request. Over `max_keys`, shapes are dropped whose
    batches another key covers, from the longest tier down and the middle buckets first; a tier keeps its smallest and
    its largest bucket as long as anything else can go.
    """
    if max_keys < 1:
        raise ValueError(f"max_keys must be at least 1, got {max_keys}")
    unique = list(dict.fromkeys(keys))
    kept, dropped = _drop_surplus(unique, max_keys)
    largest = [max((key for key in kept if key.phase == phase), key=size_of) for phase in _phases(kept)]
    largest.sort(key=size_of, reverse=True)
    rest = sorted((key for key in kept if key not in largest), key=_usefulness(kept))
    return CapturePlan(keys=(*largest, *rest), dropped=tuple(dropped))


def at_least_as_large(failed: GraphKey, remaining: Iterable[GraphKey]) -> tuple[GraphKey, ...]:
    """Those of `remaining` that need at least as much memory as `failed` in every respect, and so cannot fit either."""
    return tuple(
        key
        for key in remaining
        if key.phase == failed.phase and key.tier >= failed.tier and key.bucket >= failed.bucket and key != failed
    )


def _phases(keys: Sequence[GraphKey]) -> tuple[Phase, ...]:
    return tuple(dict.fromkeys(key.phase for key in keys))


def _usefulness(keys: Sequence[GraphKey]) -> Callable[[GraphKey], tuple[int, int, int, str]]:
    """Sort key: near the corner (smallest tier, smallest bucket) first, decode before prefill on a tie."""
    tiers = sorted({key.tier for key in keys})
    buckets = {phase: sorted({key.bucket for key in keys if key.phase == phase}) for phase in _phases(keys)}

    def rank(key: GraphKey) -> tuple[int, int, int, str]:
        tier_rank = tiers.index(key.tier)
        distance = tier_rank + buckets[key.phase].index(key.bucket)
        return distance, tier_rank, int(key.phase == "prefill"), key.variant

    return rank


def _drop_surplus(keys: list[GraphKey], max_keys: int) -> tuple[list[GraphKey], list[DroppedKey]]:
    kept, dropped = list(keys), []
    while len(kept) > max_keys:
        victim = max(kept, key=lambda key: _expendability(key, kept))
        kept.remove(victim)
        dropped.append(DroppedKey(victim, f"more than {max_keys} keys were asked for"))
    return kept, dropped


def _expendability(key: GraphKey, kept: Sequence[GraphKey]) -> tuple[int, int, int]:
    """Middle buckets before edges, long tiers before short ones, and among those the one nearest the middle."""
    row = sorted(
        other.bucket for other in kept if (other.phase, other.tier, other.variant) == (key.phase, key.tier, key.variant)
    )
    index = row.index(key.bucket)
    distance_to_edge = min(index, len(row) - 1 - index)
    return int(distance_to_edge > 0), key.tier, distance_to_edge
