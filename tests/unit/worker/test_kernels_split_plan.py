from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.kernels.split_plan import max_partials, split_plan

ROWS = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
KV_HEADS = st.integers(1, 32)
WIDTHS = st.integers(1, 131_072)


@given(rows=ROWS, num_kv_heads=KV_HEADS, width=WIDTHS, num_sms=st.sampled_from([4, 108, 132, 160]))
def test_partial_results_of_every_plan_fit_the_workspace(
    rows: int, num_kv_heads: int, width: int, num_sms: int
) -> None:
    plan = split_plan(rows=rows, num_kv_heads=num_kv_heads, head_dim=64, width=width, num_sms=num_sms)
    assert plan.num_splits >= 1
    for max_rows in (rows, 512):
        room = max_partials(max_rows=max_rows, num_kv_heads=num_kv_heads, num_sms=num_sms)
        assert rows * num_kv_heads * plan.num_splits <= room


@pytest.mark.parametrize(("head_dim", "itemsize", "tile"), [(64, 2, 128), (128, 2, 64), (80, 2, 64), (256, 4, 16)])
def test_a_tile_of_keys_has_the_same_bytes_whatever_the_head(head_dim: int, itemsize: int, tile: int) -> None:
    plan = split_plan(rows=1, num_kv_heads=8, head_dim=head_dim, width=4096, num_sms=132, itemsize=itemsize)
    assert plan.tile == tile
    assert plan.min_chunk % plan.tile == 0


def test_short_tables_are_not_split_and_long_ones_fill_the_device() -> None:
    def splits(rows: int, width: int) -> int:
        return split_plan(rows=rows, num_kv_heads=8, head_dim=64, width=width, num_sms=132).num_splits

    assert splits(1, 256) == 1
    assert splits(1, 1024) == 4
    assert splits(1, 131_072) == 33
    assert splits(256, 256) == 1
    assert splits(256, 131_072) == 4
