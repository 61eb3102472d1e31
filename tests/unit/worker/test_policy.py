from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.policy import cut_chunk, group_tiers, may_admit, prefill_budget


def test_chunks_are_short_while_rows_wait_to_decode_and_few_prompts_are_there() -> None:
    sizes = {"chunk": 1024, "chunk_when_busy": 256}
    assert prefill_budget(num_decode=0, num_prompts=1, num_waiting_tokens=5000, **sizes) == 1024
    assert prefill_budget(num_decode=1, num_prompts=1, num_waiting_tokens=5000, **sizes) == 256
    assert prefill_budget(num_decode=200, num_prompts=7, num_waiting_tokens=10**6, **sizes) == 256
    assert prefill_budget(num_decode=8, num_prompts=1, num_waiting_tokens=70, **sizes) == 70
    assert prefill_budget(num_decode=8, num_prompts=5, num_waiting_tokens=5000, chunk=64, chunk_when_busy=256) == 64


@pytest.mark.parametrize(("num_prompts", "expected"), [(7, 256), (8, 512), (15, 512), (16, 1024), (500, 1024)])
def test_chunks_widen_with_the_crowd_that_waits_up_to_a_limit(num_prompts: int, expected: int) -> None:
    crowd = {"num_decode": 8, "num_prompts": num_prompts, "num_waiting_tokens": 10**6}
    assert prefill_budget(**crowd, chunk=4096, chunk_when_busy=256) == expected
    assert prefill_budget(**crowd, chunk=256, chunk_when_busy=256) == 256


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 16), st.integers(0, 40))
def test_chunks_cover_a_prompt_once_and_start_on_whole_blocks(
    length: int, budget: int, block_size: int, cached: int
) -> None:
    start = min(cached, (length - 1) // block_size) * block_size
    while start < length:
        assert start % block_size == 0 or budget < block_size
        count = cut_chunk(start=start, remaining=length - start, budget=budget, block_size=block_size, is_first=True)
        assert 0 < count <= min(budget, length - start)
        start += count
    assert start == length


def test_a_second_segment_without_room_for_a_block_waits() -> None:
    assert cut_chunk(start=0, remaining=10, budget=3, block_size=4, is_first=False) == 0
    assert cut_chunk(start=3, remaining=10, budget=0, block_size=4, is_first=False) == 0
    assert cut_chunk(start=0, remaining=3, budget=3, block_size=4, is_first=False) == 3
    assert cut_chunk(start=8, remaining=10, budget=7, block_size=4, is_first=False) == 4


@pytest.mark.parametrize(
    ("num_new", "num_revived", "num_running", "expected"),
    [(10, 0, 0, True), (11, 0, 0, False), (8, 0, 2, True), (8, 1, 2, False), (0, 10, 0, True)],
)
def test_what_a_sequence_takes_out_of_the_free_blocks_is_what_admits_it(
    num_new: int, num_revived: int, num_running: int, expected: bool
) -> None:
    found = may_admit(num_free=10, num_new=num_new, num_revived=num_revived, num_running=num_running)
    assert found is expected


def linear(per_step: float, per_row_token: float) -> object:
    return lambda tier, rows: per_step + per_row_token * tier * rows


def test_rows_of_one_tier_and_no_rows_are_never_split() -> None:
    assert group_tiers({256: 4, 1024: 0}, linear(0, 1)) == ((256,),)  # type: ignore[arg-type]
    assert group_tiers({256: 0}, linear(0, 1)) == ()  # type: ignore[arg-type]


def test_rows_stay_together_where_a_step_costs_mostly_the_weights() -> None:
    assert group_tiers({256: 7, 4096: 1}, linear(600, 0.01)) == ((256, 4096),)  # type: ignore[arg-type]


def test_one_long_row_is_split_off_when_its_width_costs_the_short_ones_more_than_a_second_step() -> None:
    assert group_tiers({256: 31, 1024: 1, 131072: 1}, linear(600, 0.001)) == ((256, 1024), (131072,))  # type: ignore[arg-type]


def test_equal_costs_and_savings_within_the_margin_do_not_split() -> None:
    assert group_tiers({1: 1, 2: 1}, lambda tier, rows: 1.0 * rows) == ((1, 2),)
    almost = {(1, 1): 0.96, (2, 1): 1.0, (2, 2): 2.0}
    assert group_tiers({1: 1, 2: 1}, lambda tier, rows: almost[tier, rows]) == ((1, 2),)
    assert group_tiers({1: 1, 2: 1}, lambda tier, rows: almost[tier, rows], margin=0.0) == ((1,), (2,))


@given(
    st.dictionaries(st.sampled_from([256, 1024, 4096, 32768]), st.integers(0, 64)), st.floats(0, 1e4), st.floats(0, 1)
)
def test_every_tier_is_in_one_group_and_a_split_is_never_dearer(
    rows: dict[int, int], per_step: float, per_row_token: float
) -> None:
    def cost(tier: int, count: int) -> float:
        return per_step + per_row_token * tier * count

    groups = group_tiers(rows, cost)
    assert [tier for group in groups for tier in group] == sorted(tier for tier, count in rows.items() if count)
    assert len(groups) <= 2
    if groups:
        split = sum(cost(group[-1], sum(rows[tier] for tier in group)) for group in groups)
        assert split <= cost(groups[-1][-1], sum(rows.values())) + 1e-9
