from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.graphs.key import GraphKey
from worker.graphs.plan import MAX_KEYS, at_least_as_large, enumerate_keys, plan_captures, size_by_shape

TIERS = (256, 1024, 4096, 8192)
DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFILL = (16, 32, 64, 128, 256, 512, 1024, 2048)


def test_the_largest_of_each_phase_comes_first_then_the_most_useful() -> None:
    plan = plan_captures(enumerate_keys(tiers=TIERS, decode_buckets=DECODE, prefill_buckets=PREFILL))
    assert plan.keys[:4] == (
        GraphKey("prefill", 8192, 2048),
        GraphKey("decode", 8192, 256),
        GraphKey("decode", 256, 1),
        GraphKey("prefill", 256, 16),
    )
    assert len(plan.keys) == 4 * (9 + 8)
    assert not plan.dropped


def test_a_size_function_decides_what_is_largest() -> None:
    keys = enumerate_keys(tiers=(256, 1024), decode_buckets=(1, 8))
    plan = plan_captures(keys, size_of=lambda key: key.tier)
    assert plan.keys[0].tier == 1024


def test_small_shapes_come_before_large_ones_in_every_tier() -> None:
    plan = plan_captures(enumerate_keys(tiers=TIERS, decode_buckets=DECODE))
    for tier in TIERS:
        buckets = [key.bucket for key in plan.keys[1:] if key.tier == tier]
        assert buckets == sorted(buckets)


def test_keys_past_the_limit_lose_middle_buckets_of_long_tiers_first() -> None:
    keys = enumerate_keys(tiers=TIERS, decode_buckets=DECODE, prefill_buckets=PREFILL, variants=("greedy", "sample"))
    plan = plan_captures(keys)
    assert len(plan.keys) == MAX_KEYS
    assert len(plan.dropped) == len(keys) - MAX_KEYS
    assert {dropped.key.tier for dropped in plan.dropped[:20]} == {8192}
    assert all(str(MAX_KEYS) in dropped.reason for dropped in plan.dropped)
    for tier in TIERS:
        for phase, buckets in (("decode", DECODE), ("prefill", PREFILL)):
            kept = {key.bucket for key in plan.keys if key.tier == tier and key.phase == phase}
            assert {buckets[0], buckets[-1]} <= kept


@given(
    tiers=st.sets(st.integers(1, 64), min_size=1, max_size=4),
    buckets=st.sets(st.integers(1, 64), min_size=1, max_size=9),
    max_keys=st.integers(1, 40),
)
def test_a_plan_keeps_or_reports_every_key_once(tiers: set[int], buckets: set[int], max_keys: int) -> None:
    keys = enumerate_keys(tiers=sorted(tiers), decode_buckets=sorted(buckets))
    plan = plan_captures(keys, max_keys=max_keys)
    assert len(plan.keys) == min(len(keys), max_keys)
    assert sorted([*plan.keys, *(dropped.key for dropped in plan.dropped)]) == sorted(keys)
    assert plan.keys[0] == max(plan.keys, key=size_by_shape)


def test_keys_that_need_no_less_memory_than_a_failed_one() -> None:
    keys = enumerate_keys(tiers=(256, 1024), decode_buckets=(1, 8), prefill_buckets=(64,))
    failed = GraphKey("decode", 256, 8)
    assert at_least_as_large(failed, keys) == (GraphKey("decode", 1024, 8),)


def test_unsorted_tables_and_an_empty_budget_are_refused() -> None:
    with pytest.raises(ValueError, match="decode_buckets"):
        enumerate_keys(tiers=(256,), decode_buckets=(4, 1))
    with pytest.raises(ValueError, match="max_keys"):
        plan_captures([], max_keys=0)


def test_planning_needs_no_torch() -> None:
    code = "import sys, worker.graphs.plan, worker.graphs.dispatcher, worker.graphs.errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
