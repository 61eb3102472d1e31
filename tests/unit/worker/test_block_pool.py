from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.block_pool import PADDING_BLOCK, BlockPool


def test_the_padding_block_is_never_handed_out() -> None:
    blocks = BlockPool(9).allocate(8)
    assert blocks is not None
    assert sorted(blocks) == list(range(1, 9))
    assert PADDING_BLOCK not in blocks


def test_asking_for_more_than_there_is_changes_nothing() -> None:
    pool = BlockPool(5)
    assert pool.allocate(5) is None
    assert pool.num_free == 4


def test_releasing_a_block_twice_is_caught() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="not owned"):
        pool.release(blocks[:1])


@given(st.lists(st.integers(0, 6), max_size=60))
def test_no_block_ever_has_two_owners(sizes: list[int]) -> None:
    pool = BlockPool(20)
    owned: list[list[int]] = []
    for size in sizes:
        blocks = pool.allocate(size)
        if blocks is None:
            pool.release(owned.pop(0))
            continue
        owned.append(blocks)
        flat = [block for group in owned for block in group]
        assert len(flat) == len(set(flat))
        assert len(flat) + pool.num_free == pool.num_usable
