"""When the pieces of answers are sent: messages cost, not tokens."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config import ReplicaConfig


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """The first token of an answer, an end and an error go at once; the rest at most once an interval.

    The interval grows with the number of live answers so that messages take at most half of the time of whoever
    receives them. It fails in that a burst of new answers is sent token by token until the next interval.
    """

    interval_s: float
    max_interval_s: float
    cost_s: float

    @classmethod
    def of(cls, config: ReplicaConfig) -> FlushPolicy:
        """As the replica is set up."""
        return cls(config.flush_interval_ms / 1000, config.max_flush_interval_ms / 1000, config.flush_cost_ms / 1000)

    @classmethod
    def at_once(cls) -> FlushPolicy:
        """Whatever comes is sent, for engines that gather tokens themselves."""
        return cls(0.0, 0.0, 0.0)

    def interval(self, num_live: int) -> float:
        """Seconds between flushes with so many live answers; 0 = every step is sent."""
        if self.interval_s == 0:
            return 0.0
        return min(max(self.interval_s, 2 * self.cost_s * num_live), self.max_interval_s)
