"""Tiers (sequence-length classes) and buckets (padded batch sizes): pure tables."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

NUM_TIERS = 4
DEFAULT_TIERS = (256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class TierTable:
    """Exactly four sequence lengths in tokens, ascending; the last covers the longest sequence allowed."""

    lengths: tuple[int, ...]
    block_size: int

    def __post_init__(self) -> None:
        if len(self.lengths) != NUM_TIERS or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 1:
            raise ValueError(f"tiers are {self.lengths}, must be {NUM_TIERS} ascending lengths")

    @property
    def longest(self) -> int:
        """The longest sequence, prompt and answer together, in tokens."""
        return self.lengths[-1]

    def fit(self, length: int) -> int:
        """The smallest tier that holds `length` tokens. Raises ValueError past the last one."""
        index = bisect_left(self.lengths, length)
        if index == NUM_TIERS:
            raise ValueError(f"a sequence of {length} tokens is longer than the last tier, {self.longest}")
        return self.lengths[index]

    def num_blocks(self, length: int) -> int:
        """Blocks that `length` tokens need; for a tier, the width of its block table."""
        return -(-length // self.block_size)


def default_tiers(max_model_len: int) -> tuple[int, ...]:
    """256, 1024, 4096 and the limit; for limits of 4096 or less each tier is half of the next."""
    if max_model_len > DEFAULT_TIERS[-1]:
        return (*DEFAULT_TIERS, max_model_len)
    if max_model_len < 2 ** (NUM_TIERS - 1):
        raise ValueError(f"max_model_len is {max_model_len}, must be at least {2 ** (NUM_TIERS - 1)}")
    return tuple(max_model_len >> shift for shift in reversed(range(NUM_TIERS)))


@dataclass(frozen=True, slots=True)
class BucketTable:
    """Sizes a step is padded to, ascending, always with 1 and the largest allowed."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] != 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"buckets are {self.sizes}, must ascend from 1")

    @property
    def largest(self) -> int:
        """The largest batch one step can take."""
        return self.sizes[-1]

    def fit(self, rows: int) -> int:
        """The smallest bucket of at least `rows`. Raises ValueError past the largest."""
        index = bisect_left(self.sizes, rows)
        if index == len(self.sizes):
            raise ValueError(f"{rows} rows are more than the largest bucket, {self.largest}")
        return self.sizes[index]


def default_buckets(max_batch: int) -> tuple[int, ...]:
    """Powers of two up to `max_batch`, which is always the last."""
    powers = [1 << shift for shift in range(max_batch.bit_length()) if 1 << shift < max_batch]
    return (*powers, max_batch)
