"""Which captured graph serves a batch: the only owner of the set of valid keys."""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from worker.graphs.key import GraphKey, Phase


class MissReason(enum.Enum):
    """Why a batch runs eagerly."""

    NOT_PLANNED = "no graph was planned that covers it"
    PENDING = "its graph is not captured yet"
    DROPPED = "its graph was dropped"
    QUARANTINED = "its graph disagreed with eager execution"
    TOO_MUCH_PADDING = "the graph that covers it would be mostly padding"


@dataclass(frozen=True, slots=True)
class Miss:
    """The reason, and the batch and key it is about, for people."""

    reason: MissReason
    detail: str
    pending: GraphKey | None = None
    """The key that will serve such batches once it is captured."""


class Dispatcher:
    """Finds the smallest captured bucket that holds a batch, at the smallest captured tier that covers its lengths.

    Pure bookkeeping: no device, no clock. A quarantined key is never returned: a batch it would serve runs eagerly, and
    so does a batch that would be padded to more than `max_padding` times its rows.
    """

    def __init__(self, *, max_padding: float = float("inf")) -> None:
        if max_padding < 1:
            raise ValueError(f"max_padding must be at least 1, got {max_padding}")
        self._max_padding = max_padding
        self._captured: dict[tuple[Phase, str], dict[int, list[int]]] = {}
        self._tiers: dict[tuple[Phase, str], list[int]] = {}
        self._pending: set[GraphKey] = set()
        self._dropped: dict[GraphKey, str] = {}
        self._quarantined: dict[GraphKey, str] = {}
        self._replays: Counter[GraphKey] = Counter()
        self._padding: Counter[GraphKey] = Counter()
        self._misses: Counter[MissReason] = Counter()

    def expect(self, keys: Iterable[GraphKey]) -> None:
        """Announce keys that will be captured later, so that a miss can say so."""
        self._pending.update(key for key in keys if not self.is_captured(key))

    def add(self, key: GraphKey) -> None:
        """A graph for `key` can be replayed from now on."""
        self._pending.discard(key)
        self._dropped.pop(key, None)
        self._quarantined.pop(key, None)
        if self.is_captured(key):
            return
        family = (key.phase, key.variant)
        buckets = self._captured.setdefault(family, {})
        if key.tier not in buckets:
            insort(self._tiers.setdefault(family, []), key.tier)
        insort(buckets.setdefault(key.tier, []), key.bucket)

    def drop(self, key: GraphKey, reason: str) -> None:
        """There is no graph for `key` and there will be none."""
        self._pending.discard(key)
        self._quarantined.pop(key, None)
        self._forget(key)
        self._dropped[key] = reason

    def withdraw(self, key: GraphKey) -> None:
        """The graph for `key` is gone for now; it will be captured again."""
        self._forget(key)
        self._quarantined.pop(key, None)
        self._pending.add(key)

    def quarantine(self, key: GraphKey, reason: str) -> None:
        """Never return `key` again: batches it would serve run eagerly."""
        self.add(key)
        self._quarantined[key] = reason

    def find(self, phase: Phase, tier: int, rows: int, variant: str = "default") -> GraphKey | Miss:
        """The key that serves `rows` rows (or tokens) of at most `tier` tokens, or why there is none. Counts nothing."""
        family = (phase, variant)
        tiers = self._tiers.get(family, [])
        for at_tier in tiers[bisect_left(tiers, tier) :]:
            buckets = self._captured[family][at_tier]
            index = bisect_left(buckets, rows)
            if index < len(buckets):
                return self._judge(GraphKey(phase, at_tier, buckets[index], variant), rows)
        return self._explain(phase, tier, rows, variant)

    def dispatch(self, phase: Phase, tier: int, rows: int, variant: str = "default") -> GraphKey | Miss:
        """`find`, and count the replay, its padding rows, or the miss."""
        found = self.find(phase, tier, rows, variant)
        if isinstance(found, Miss):
            self._misses[found.reason] += 1
        else:
            self._replays[found] += 1
            self._padding[found] += found.bucket - rows
        return found

    def is_captured(self, key: GraphKey) -> bool:
        """Whether a graph exists for `key`, quarantined or not."""
        return key.bucket in self._captured.get((key.phase, key.variant), {}).get(key.tier, ())

    @property
    def captured(self) -> frozenset[GraphKey]:
        """The keys that `find` may return."""
        return frozenset(
            key
            for (phase, variant), tiers in self._captured.items()
            for tier, buckets in tiers.items()
            for bucket in buckets
            if (key := GraphKey(phase, tier, bucket, variant)) not in self._quarantined
        )

    @property
    def quarantined(self) -> Mapping[GraphKey, str]:
        """Keys that run eagerly because their graph disagreed, with the finding."""
        return MappingProxyType(self._quarantined)

    @property
    def dropped(self) -> Mapping[GraphKey, str]:
        """Keys that were given up, with the reason."""
        return MappingProxyType(self._dropped)

    @property
    def replays(self) -> Mapping[GraphKey, int]:
        """Times each key was dispatched."""
        return MappingProxyType(self._replays)

    @property
    def padding_rows(self) -> Mapping[GraphKey, int]:
        """Padding rows each key has computed in all."""
        return MappingProxyType(self._padding)

    @property
    def misses(self) -> Mapping[MissReason, int]:
        """Batches that ran eagerly, by reason."""
        return MappingProxyType(self._misses)

    def _judge(self, key: GraphKey, rows: int) -> GraphKey | Miss:
        if key in self._quarantined:
            return Miss(MissReason.QUARANTINED, f"{key}: {self._quarantined[key]}")
        if key.bucket > rows * self._max_padding:
            return Miss(MissReason.TOO_MUCH_PADDING, f"{rows} rows would be padded to {key.bucket} by {key}")
        return key

    def _explain(self, phase: Phase, tier: int, rows: int, variant: str) -> Miss:
        def covers(key: GraphKey) -> bool:
            return key.phase == phase and key.variant == variant and key.tier >= tier and key.bucket >= rows

        wanted = f"{phase} of {rows} rows at tier {tier}, variant {variant}"
        pending = sorted(filter(covers, self._pending))
        if pending:
            return Miss(MissReason.PENDING, f"{wanted}: {pending[0]} is not captured yet", pending[0])
        dropped = sorted(filter(covers, self._dropped))
        if dropped:
            return Miss(MissReason.DROPPED, f"{wanted}: {dropped[0]} was dropped, {self._dropped[dropped[0]]}")
        return Miss(MissReason.NOT_PLANNED, f"{wanted}: nothing planned covers it")

    def _forget(self, key: GraphKey) -> None:
        if not self.is_captured(key):
            return
        family = (key.phase, key.variant)
        self._captured[family][key.tier].remove(key.bucket)
        if not self._captured[family][key.tier]:
            del self._captured[family][key.tier]
            self._tiers[family].remove(key.tier)
