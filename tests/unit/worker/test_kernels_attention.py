"""Kernels that read and write the paged pool, against plain torch. Without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.fakes import reference_kernels as reference
from tests.fakes.kernel_inputs import Heads, Pool, layout, projections, workspace
from tests.fakes.triton_interpreter import DEVICE
from worker.kernels.decode_attention import decode_attention
from worker.kernels.rope_cache import rope_and_cache
from worker.kernels.split_plan import SplitPlan

TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
WIDTH, BLOCK_SIZE = 24, 4
LENGTHS = (1, 2, 4, 5, 17, 18, 33, 96)
"""One token; edges of blocks and of tiles, and one beyond; the whole table."""
GROUPED = Heads(num_heads=6, num_kv_heads=2, head_dim=16)
NORMED = Heads(num_heads=4, num_kv_heads=2, head_dim=32, has_norms=True)
ODD_SIZE = Heads(num_heads=2, num_kv_heads=2, head_dim=20)
MANY = Heads(num_heads=18, num_kv_heads=1, head_dim=8)
ALL_HEADS = [GROUPED, NORMED, ODD_SIZE, MANY]
ONE_PROGRAM = SplitPlan(num_splits=1, min_chunk=96, tile=16, num_warps=4, num_stages=2)
MANY_PROGRAMS = SplitPlan(num_splits=4, min_chunk=16, tile=16, num_warps=4, num_stages=2)
UNEVEN = SplitPlan(num_splits=3, min_chunk=32, tile=32, num_warps=4, num_stages=2)


class Step:
    """One decode step by the kernel and by the reference, from the same inputs."""

    def __init__(self, heads: Heads, lengths: tuple[int, ...] = LENGTHS, dtype: torch.dtype = torch.float32) -> None:
        self.heads = heads
        self.pool = Pool(heads, lengths, width=WIDTH, dtype=dtype, device=DEVICE, block_size=BLOCK_SIZE)
        self.layout = layout(heads, dtype=dtype, device=DEVICE, num_positions=WIDTH * BLOCK_SIZE)
        self.qkv = projections(heads, len(lengths), dtype=dtype, device=DEVICE)
        self.workspace = workspace(heads, len(lengths), DEVICE)

    def kernel(self, plan: SplitPlan, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pool = self.pool
        keys, values = pool.keys.clone(), pool.values.clone()
        out = decode_attention(
            self.layout.split(self.qkv), keys, values, pool.block_tables, pool.positions, self.workspace,
            layout=self.layout, sliding_window=window, plan=plan,
        )  # fmt: skip
        assert not self.workspace.arrived.any()
        return out, keys, values

    def reference(self, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pool = self.pool
        qkv, keys, values = self.qkv.clone(), pool.keys.clone(), pool.values.clone()
        reference.rope_and_cache(qkv, self.layout, pool.positions, pool.slots, keys, values)
        out = reference.paged_attention(
            self.layout.split(qkv)[0], keys, values, pool.block_tables, pool.positions + 1,
            scale=self.heads.head_dim**-0.5, sliding_window=window,
        )  # fmt: skip
        return out, keys, values


def assert_all_close(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        tolerance = TOLERANCE[ours.dtype]
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("heads", ALL_HEADS, ids=str)
def test_queries_and_keys_are_turned_and_cached_as_torch_does_it(heads: Heads) -> None:
    step = Step(heads, (1, 4, 5, 96))
    pool, ours, theirs = step.pool, step.qkv.clone(), step.qkv.clone()
    keys, values = pool.keys.clone(), pool.values.clone()

    rope_and_cache(ours, step.layout, pool.positions, pool.slots, keys, values)

    expected_keys, expected_values = pool.keys.clone(), pool.values.clone()
    reference.rope_and_cache(theirs, step.layout, pool.positions, pool.slots, expected_keys, expected_values)
    assert_all_close((ours, keys, values), (theirs, expected_keys, expected_values))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_turned_keys_keep_half_precision(dtype: torch.dtype) -> None:
    step = Step(NORMED, (1, 9), dtype)
    pool, ours, theirs = step.pool, step.qkv.clone(), step.qkv.clone()
    rope_and_cache(ours, step.layout, pool.positions, pool.slots, pool.keys.clone(), pool.values.clone())
    reference.rope_and_cache(theirs, step.layout, pool.positions, pool.slots, pool.keys.clone(), pool.values.clone())
    assert_all_close((ours,), (theirs,))


@pytest.mark.parametrize("plan", [ONE_PROGRAM, MANY_PROGRAMS, UNEVEN], ids=["one", "many", "uneven"])
@pytest.mark.parametrize("heads", ALL_HEADS, ids=str)
def test_decode_equals_torch_and_nothing_dead_is_read(heads: Heads, plan: SplitPlan) -> None:
    step = Step(heads)
    assert_all_close(step.kernel(plan), step.reference())


@pytest.mark.parametrize("window", [1, 5, 16, 100])
@pytest.mark.parametrize("plan", [ONE_PROGRAM, MANY_PROGRAMS], ids=["one", "many"])
def test_a_sliding_window_hides_older_keys(plan: SplitPlan, window: int) -> None:
    step = Step(GROUPED)
    assert_all_close(step.kernel(plan, window), step.reference(window))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decode_in_half_precision_stays_close(dtype: torch.dtype) -> None:
    step = Step(GROUPED, (1, 18, 96), dtype)
    assert_all_close(step.kernel(MANY_PROGRAMS), step.reference())


def test_a_rows_result_does_not_depend_on_the_rows_beside_it() -> None:
    together = Step(GROUPED)
    alone = together.kernel(MANY_PROGRAMS)[0][5]
    pool = together.pool
    pool.block_tables, pool.positions = pool.block_tables[5:6], pool.positions[5:6]
    together.qkv = together.qkv[5:6]
    assert torch.equal(together.kernel(MANY_PROGRAMS)[0][0], alone)


def test_padding_rows_at_position_zero_change_no_live_row() -> None:
    step = Step(GROUPED, (17, 1, 1))
    step.pool.block_tables[1:] = 0
    expected = Step(GROUPED, (17,))
    expected.pool.keys, expected.pool.values = step.pool.keys, step.pool.values
    expected.pool.block_tables = step.pool.block_tables[:1]
    expected.qkv = step.qkv[:1]

    out = step.kernel(MANY_PROGRAMS)[0]

    assert torch.equal(out[:1], expected.kernel(MANY_PROGRAMS)[0])
    assert out.isfinite().all()


def test_queries_turned_elsewhere_are_attended_as_they_are_with_any_strides() -> None:
    step = Step(GROUPED)
    pool, qkv = step.pool, step.qkv.clone()
    reference.rope_and_cache(qkv, step.layout, pool.positions, pool.slots, pool.keys.clone(), pool.values.clone())
    # As transformers hands them over: heads before rows.
    q, k, v = (heads.transpose(0, 1).contiguous().transpose(0, 1) for heads in step.layout.split(qkv))

    keys, values = pool.keys.clone(), pool.values.clone()
    out = decode_attention(
        (q, k, v), keys, values, pool.block_tables, pool.positions, step.workspace, scale=0.3, plan=MANY_PROGRAMS
    )

    expected = reference.paged_attention(q, keys, values, pool.block_tables, pool.positions + 1, scale=0.3)
    assert_all_close((out,), (expected,))


def test_a_table_that_is_part_of_a_wider_one_is_read_with_its_own_stride() -> None:
    step = Step(GROUPED)
    expected = step.kernel(UNEVEN)[0]
    wide = torch.zeros(len(LENGTHS), 2 * WIDTH, dtype=torch.int32, device=DEVICE)
    wide[:, :WIDTH] = step.pool.block_tables
    step.pool.block_tables = wide[:, :WIDTH]
    assert torch.equal(step.kernel(UNEVEN)[0], expected)
