from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.caching_allocator import CachingPool, round_up, segment_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ],
)
def test_a_segment_is_small_middle_or_of_its_own_size(size: int, segment: int) -> None:
    assert segment_bytes(size) == segment
    pool = CachingPool()
    pool.take(size)
    assert pool.reserved_bytes == segment


def test_freed_memory_is_used_again_and_stays_reserved() -> None:
    pool = CachingPool()
    with pool.held(128 * MIB):
        pass
    with pool.held(60 * MIB, 60 * MIB):
        assert pool.reserved_bytes == 128 * MIB


def test_small_and_large_allocations_do_not_share_segments() -> None:
    pool = CachingPool()
    with pool.held(128 * MIB):
        pass
    pool.take(1000)
    assert pool.reserved_bytes == 130 * MIB


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    pool = CachingPool()
    with pool.held(64 * MIB, 16 * MIB):
        pass
    pool.take(16 * MIB)
    pool.take(64 * MIB)
    assert pool.reserved_bytes == 80 * MIB


def test_a_rest_of_at_most_a_mebibyte_is_not_split_off() -> None:
    pool = CachingPool()
    with pool.held(11 * MIB):
        pass
    assert pool.take(11 * MIB).size == 12 * MIB
    assert pool.reserved_bytes == 12 * MIB


def test_over_its_limit_a_pool_says_what_is_missing_and_keeps_what_it_had() -> None:
    pool = CachingPool(limit_bytes=100 * MIB)
    with pytest.raises(MemoryError, match="64 MiB are needed where 36 MiB are left"), pool.held(64 * MIB, 64 * MIB):
        raise AssertionError("it fitted")
    with pool.held(64 * MIB):
        assert pool.reserved_bytes == 64 * MIB


def test_only_segments_that_nothing_uses_are_returned() -> None:
    pool = CachingPool()
    kept = pool.take(30 * MIB)
    with pool.held(50 * MIB):
        pass
    pool.trim()
    assert pool.reserved_bytes == 30 * MIB
    pool.give(kept)
    pool.trim()
    assert pool.reserved_bytes == 0


@given(st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=20))
def test_what_is_held_together_fits_in_what_is_reserved_and_a_second_time_needs_no_more(sizes: list[int]) -> None:
    pool = CachingPool()
    for _ in range(2):
        with pool.held(*sizes):
            assert pool.reserved_bytes >= sum(round_up(size, 512) for size in sizes)
        first = pool.reserved_bytes
    with pool.held(*sizes):
        assert pool.reserved_bytes == first
