from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.tiers import NUM_TIERS, BucketTable, TierTable, default_buckets, default_tiers


@given(st.integers(min_value=8, max_value=1 << 20))
def test_default_tiers_are_four_ascending_lengths_that_end_at_the_limit(limit: int) -> None:
    tiers = default_tiers(limit)
    assert len(tiers) == NUM_TIERS
    assert list(tiers) == sorted(set(tiers))
    assert tiers[-1] == limit


def test_default_tiers_of_a_long_context_are_the_documented_ones() -> None:
    assert default_tiers(131072) == (256, 1024, 4096, 131072)


@pytest.mark.parametrize("lengths", [(1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 2, 4), (4, 3, 2, 1), (0, 1, 2, 3)])
def test_anything_but_four_ascending_lengths_is_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        TierTable(lengths, 16)


@pytest.mark.parametrize(
    ("length", "tier"), [(1, 256), (255, 256), (256, 256), (257, 1024), (1024, 1024), (1025, 4096), (8192, 8192)]
)
def test_a_sequence_lives_in_the_smallest_tier_that_holds_it(length: int, tier: int) -> None:
    assert TierTable(default_tiers(8192), 16).fit(length) == tier


def test_a_sequence_past_the_last_tier_is_refused_with_both_lengths() -> None:
    with pytest.raises(ValueError, match=r"8193.*8192"):
        TierTable(default_tiers(8192), 16).fit(8193)


@given(st.integers(min_value=1, max_value=1000))
def test_default_buckets_hold_one_and_the_largest_and_fit_every_batch(max_batch: int) -> None:
    table = BucketTable(default_buckets(max_batch))
    assert table.sizes[0] == 1
    assert table.largest == max_batch
    for rows in range(1, max_batch + 1):
        bucket = table.fit(rows)
        assert bucket >= rows
        assert not any(rows <= smaller < bucket for smaller in table.sizes)


def test_a_batch_past_the_largest_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="9 rows"):
        BucketTable((1, 2, 4, 8)).fit(9)


@pytest.mark.parametrize("sizes", [(), (2, 4), (1, 4, 2), (1, 1)])
def test_buckets_must_ascend_from_one(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascend from 1"):
        BucketTable(sizes)
