"""How torch's caching allocator turns allocations into device memory, without a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

ROUNDING = 512
SMALL = 1 << 20
"""Up to here allocations come from small segments."""
SMALL_SEGMENT = 2 << 20
MIDDLE_SEGMENT = 20 << 20
MIDDLE = 10 << 20
"""Below this an allocation opens a segment of MIDDLE_SEGMENT; from here one of its own size."""
GRANULE = 2 << 20
"""Segments of their own size, and what the driver itself takes, are multiples of this."""


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of a segment, in use or free."""

    size: int
    is_free: bool


@dataclass(slots=True, eq=False)
class _Segment:
    is_small: bool
    blocks: list[Block] = field(default_factory=list)


class CachingPool:
    """The segments of one memory pool: best fit, split, merged when freed, given back only as a whole.

    With `limit_bytes`, an allocation that would take the segments past it raises MemoryError.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        """What all segments take from the device."""
        self._segments: list[_Segment] = []

    def take(self, num_bytes: int) -> Block:
        """Allocate. The block must be given back with `give`."""
        size = round_up(max(num_bytes, 1), ROUNDING)
        segment, block = self._best_fit(size) or self._open_segment(size)
        rest = block.size - size
        if rest >= ROUNDING if segment.is_small else rest > SMALL:
            segment.blocks.insert(segment.blocks.index(block) + 1, Block(rest, True))
            block.size = size
        block.is_free = False
        return block

    def give(self, block: Block) -> None:
        """Free a block; its segment stays."""
        segment = next(segment for segment in self._segments if block in segment.blocks)
        block.is_free = True
        merged: list[Block] = []
        for each in segment.blocks:
            if merged and merged[-1].is_free and each.is_free:
                merged[-1].size += each.size
            else:
                merged.append(each)
        segment.blocks = merged

    @contextlib.contextmanager
    def held(self, *sizes: int) -> Iterator[None]:
        """Allocate these, in order, for the length of a block."""
        taken: list[Block] = []
        try:
            for size in sizes:
                taken.append(self.take(size))  # noqa: PERF401 - what was taken before a failure is given back
            yield
        finally:
            for block in taken:
                self.give(block)

    def trim(self) -> None:
        """Return the segments that nothing uses to the device."""
        kept = [segment for segment in self._segments if any(not block.is_free for block in segment.blocks)]
        self.reserved_bytes = sum(block.size for segment in kept for block in segment.blocks)
        self._segments = kept

    def _best_fit(self, size: int) -> tuple[_Segment, Block] | None:
        fitting = [
            (segment, block)
            for segment in self._segments
            if segment.is_small == (size <= SMALL)
            for block in segment.blocks
            if block.is_free and block.size >= size
        ]
        return min(fitting, key=lambda found: found[1].size, default=None)

    def _open_segment(self, size: int) -> tuple[_Segment, Block]:
        num_bytes = segment_bytes(size)
        if self.limit_bytes is not None and self.reserved_bytes + num_bytes > self.limit_bytes:
            left = max(self.limit_bytes - self.reserved_bytes, 0)
            raise MemoryError(f"{num_bytes >> 20} MiB are needed where {left >> 20} MiB are left")
        block = Block(num_bytes, True)
        segment = _Segment(size <= SMALL, [block])
        self._segments.append(segment)
        self.reserved_bytes += num_bytes
        return segment, block


def segment_bytes(size: int) -> int:
    """The segment that an allocation of `size` bytes opens."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return MIDDLE_SEGMENT if size < MIDDLE else round_up(size, GRANULE)


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple
