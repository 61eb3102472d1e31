from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from worker.block_pool import PADDING_BLOCK, BlockPool


def taken(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


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


def test_a_block_with_an_identity_is_found_and_shared_while_held_and_afterwards() -> None:
    pool = BlockPool(4)
    (block,) = taken(pool, 1)
    pool.identify(block, b"a")
    assert pool.find(b"a") == block
    pool.share([block])
    assert pool.num_holders(block) == 2
    pool.release([block])
    pool.release([block])
    assert (pool.num_free, pool.num_cached, pool.find(b"a")) == (3, 1, block)
    pool.share([block])
    assert (pool.num_free, pool.num_cached, pool.num_holders(block)) == (2, 0, 1)


def test_blank_blocks_go_first_and_then_the_cached_one_released_longest_ago() -> None:
    pool = BlockPool(5)
    a, b, c = taken(pool, 3)
    for block, identity in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.identify(block, identity)
    pool.release([b])
    pool.release([a])
    pool.release([c])
    pool.share([b])  # used again: now it is the youngest
    pool.release([b])
    taken(pool, 1)
    assert pool.num_cached == 3
    assert taken(pool, 1) == [a]
    assert pool.find(b"a") is None
    assert taken(pool, 2) == [c, b]


def test_the_end_of_a_released_chain_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(4)
    table = taken(pool, 3)
    for number, block in enumerate(table):
        pool.identify(block, bytes([number]))
    pool.release(table)
    assert taken(pool, 3) == table[::-1]


def test_the_first_of_two_equal_blocks_keeps_the_identity() -> None:
    pool = BlockPool(4)
    first, second = taken(pool, 2)
    pool.identify(first, b"a")
    pool.identify(second, b"a")
    assert pool.find(b"a") == first
    pool.release([second])
    assert pool.num_cached == 0


def test_a_forgotten_block_stays_with_its_holders_and_is_then_blank() -> None:
    pool = BlockPool(3)
    held, cached = taken(pool, 2)
    pool.identify(held, b"held")
    pool.identify(cached, b"cached")
    pool.release([cached])
    for identity in (b"held", b"cached", b"unknown"):
        pool.forget(identity)
    assert pool.find(b"held") is pool.find(b"cached") is None
    assert pool.num_holders(held) == 1
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.release([held])
    assert (pool.num_free, pool.num_cached) == (2, 0)


@pytest.mark.parametrize("misuse", ["share blank", "identify free", "identify twice"])
def test_misuse_is_caught(misuse: str) -> None:
    pool = BlockPool(3)
    (block,) = taken(pool, 1)
    if misuse == "identify twice":
        pool.identify(block, b"a")
    elif misuse == "identify free":
        pool.release([block])
    with pytest.raises(AssertionError):
        pool.share([block]) if misuse == "share blank" else pool.identify(block, b"b")


class PoolMachine(RuleBasedStateMachine):
    """Tables come, share, are identified and go; a model of plain dictionaries says what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.reserved = self.pool.reserve(1)
        self.tables: list[list[int]] = []
        self.identity_of: dict[int, bytes] = {}

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > self.num_free())
        if blocks is None:
            return
        assert not {block for table in self.tables for block in table} & set(blocks)
        for block in blocks:
            self.identity_of.pop(block, None)
        self.tables.append(blocks)

    @rule(data=st.data(), identity=st.sampled_from([b"a", b"b", b"c", b"d", b"e"]))
    def identify(self, data: st.DataObject, identity: bytes) -> None:
        unnamed = sorted({block for table in self.tables for block in table} - self.identity_of.keys())
        if unnamed:
            block = data.draw(st.sampled_from(unnamed))
            self.pool.identify(block, identity)
            if identity not in self.identity_of.values():
                self.identity_of[block] = identity

    @rule(identity=st.sampled_from([b"a", b"b", b"c", b"d", b"e"]))
    def share(self, identity: bytes) -> None:
        block = self.pool.find(identity)
        assert (block is not None) == (identity in self.identity_of.values())
        if block is not None:
            self.pool.share([block])
            self.tables.append([block])

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.tables:
            self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule(identity=st.sampled_from([b"a", b"b", b"c"]))
    def forget(self, identity: bytes) -> None:
        self.pool.forget(identity)
        self.identity_of = {block: known for block, known in self.identity_of.items() if known != identity}

    def num_free(self) -> int:
        return self.pool.num_usable - len({block for table in self.tables for block in table})

    @invariant()
    def every_block_is_held_or_cached_or_blank(self) -> None:
        held = [block for table in self.tables for block in table]
        assert all(
            self.pool.num_holders(block) == held.count(block) for block in range(1, 9) if block not in self.reserved
        )
        assert self.pool.num_free == self.num_free()
        assert self.pool.num_cached == len(self.identity_of.keys() - set(held))
        assert not set(held) & {PADDING_BLOCK, *self.reserved}
        assert all(self.pool.find(identity) == block for block, identity in self.identity_of.items())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
