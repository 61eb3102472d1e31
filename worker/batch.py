"""What one step computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from worker.sequence import Sequence

Phase = Literal["prefill", "decode"]


class Segment(NamedTuple):
    """Consecutive tokens of one sequence inside a step: `count` of them from position `start`.

    A tuple, since a decode step makes one for every row.
    """

    sequence: Sequence
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody asks of a segment
    samples: bool = True
    """Whether the step reaches the sequence's last token, so that a new one is chosen."""

    @property
    def end(self) -> int:
        """Tokens in the KV pool once the step has run."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """The segments of one step, and the shape it is padded to.

    Decode: one token a segment, `bucket` rows. Prefill: `bucket` counts tokens over all segments.
    """

    phase: Phase
    segments: tuple[Segment, ...]
    tier: int
    bucket: int

    @property
    def sampling(self) -> tuple[Segment, ...]:
        """The segments that get a new token, in order."""
        if self.phase == "decode":
            return self.segments
        return tuple(segment for segment in self.segments if segment.samples)

    @property
    def num_tokens(self) -> int:
        """Tokens computed, without padding."""
        return sum(segment.count for segment in self.segments)
