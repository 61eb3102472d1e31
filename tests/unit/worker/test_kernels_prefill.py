"""Prefill attention in one kernel against plain torch. Without a GPU it runs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.fakes.kernel_inputs import Heads, layout, projections
from tests.fakes.triton_interpreter import DEVICE
from worker.attention.fixed_prefill import ChunkPrefillAttention, FreshPrefillAttention
from worker.attention.fused_prefill import FusedPrefillAttention
from worker.attention.pooled import Scoring
from worker.attention.triton_prefill import TritonPrefillAttention
from worker.kernels.prefill_attention import PagedKeys, prefill_attention
from worker.kv_cache import KVCache

BLOCK_SIZE, WIDTH = 4, 24
HEADS = {
    "grouped": Heads(num_heads=4, num_kv_heads=2, head_dim=16),
    "head of 24, normed": Heads(num_heads=3, num_kv_heads=1, head_dim=24, has_norms=True),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def pool(heads: Heads, dtype: torch.dtype, num_live: int, table: list[int]) -> KVCache:
    """Random keys and values at the first places of `table`; NaN everywhere else."""
    cache = KVCache(
        num_layers=1,
        num_blocks=WIDTH + 2,
        block_size=BLOCK_SIZE,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=dtype,
        device=DEVICE,
    )
    cache.storage.fill_(torch.nan)
    generator = torch.Generator().manual_seed(3)
    for place in range(num_live):
        for half in (cache.keys[0], cache.values[0]):
            row = torch.randn(heads.num_kv_heads, heads.head_dim, generator=generator)
            half[table[place // BLOCK_SIZE], place % BLOCK_SIZE] = row.to(DEVICE, dtype)
    return cache


def assert_same_live(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("start", "count", "bucket"), [(7, 5, 8), (40, 20, 20), (64, 1, 16), (0, 19, 32)])
def test_a_chunk_sees_all_before_it_and_itself_causally(
    heads: str, start: int, count: int, bucket: int, dtype: torch.dtype
) -> None:
    shape = HEADS[heads]
    table = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1)).add_(1).to(torch.int32)
    positions = torch.zeros(bucket, dtype=torch.int64)
    positions[:count] = torch.arange(start, start + count)
    slots = torch.zeros(bucket, dtype=torch.int64)
    slots[:count] = table[positions[:count] // BLOCK_SIZE].long() * BLOCK_SIZE + positions[:count] % BLOCK_SIZE
    positions, slots, block_table = positions.to(DEVICE), slots.to(DEVICE), table.to(DEVICE)
    of_heads = layout(shape, dtype=dtype, device=DEVICE, num_positions=WIDTH * BLOCK_SIZE)
    ours_pool, their_pool = (pool(shape, dtype, start, table.tolist()) for _ in range(2))
    ours = FusedPrefillAttention(
        TritonPrefillAttention(ours_pool, slots=slots, positions=positions, block_table=block_table)
    )
    context_len = torch.tensor([start + count], device=DEVICE)
    theirs = FusedPrefillAttention(
        ChunkPrefillAttention(
            their_pool, slots=slots, positions=positions, block_table=block_table, context_len=context_len
        )
    )
    qkv = projections(shape, bucket, dtype=dtype, device=DEVICE)

    found = ours.attend_qkv(0, qkv.clone(), positions, of_heads)
    wanted = theirs.attend_qkv(0, qkv.clone(), positions, of_heads)

    assert_same_live(found[:count], wanted[:count], dtype)
    assert found[:count].isfinite().all()
    live = slots[:count]
    assert torch.equal(ours_pool.keys[0].flatten(0, 1)[live], their_pool.keys[0].flatten(0, 1)[live])


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("count", [1, 17, 40])
def test_a_fresh_prompt_is_plainly_causal_and_windows_hold(count: int, window: int | None) -> None:
    heads, dtype = HEADS["grouped"], torch.float32
    slots = torch.arange(count, device=DEVICE) + BLOCK_SIZE
    ours = TritonPrefillAttention(pool(heads, dtype, 0, []), slots=slots)
    theirs = FreshPrefillAttention(pool(heads, dtype, 0, []), slots=slots)
    qkv = projections(heads, count, dtype=dtype, device=DEVICE).view(count, -1, heads.head_dim)
    q, k, v = qkv.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)

    found = ours(0, q, k, v, scale=0.3, sliding_window=window)

    assert_same_live(found, theirs(0, q, k, v, scale=0.3, sliding_window=window), dtype)
    assert torch.equal(ours.kv_cache.values[0].flatten(0, 1)[slots], v)


def test_a_window_over_the_pool_leaves_out_what_is_far() -> None:
    heads, dtype, start, count, window = HEADS["grouped"], torch.float32, 50, 6, 9
    table = torch.arange(1, WIDTH + 1, dtype=torch.int32, device=DEVICE)
    positions = torch.arange(start, start + count, device=DEVICE)
    cache = pool(heads, dtype, start, table.tolist())
    places = {"slots": positions + BLOCK_SIZE, "positions": positions, "block_table": table}
    qkv = projections(heads, count, dtype=dtype, device=DEVICE).view(count, -1, heads.head_dim)
    q, k, v = qkv.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)

    found = TritonPrefillAttention(cache, **places)(0, q, k, v, sliding_window=window)

    context_len = torch.tensor([start + count], device=DEVICE)
    wanted = ChunkPrefillAttention(cache, **places, context_len=context_len)(0, q, k, v, sliding_window=window)
    assert_same_live(found, wanted, dtype)


@pytest.mark.parametrize("num_splits", [1, 2, 7])
@pytest.mark.parametrize("heads", HEADS)
def test_the_keys_of_a_query_may_be_divided_among_programs(heads: str, num_splits: int) -> None:
    shape, dtype, start, count, bucket = HEADS[heads], torch.float32, 61, 5, 8
    table = torch.arange(1, WIDTH + 1, dtype=torch.int32, device=DEVICE)
    cache = pool(shape, dtype, start + count, table.tolist())
    positions = torch.zeros(bucket, dtype=torch.int64, device=DEVICE)
    positions[:count] = torch.arange(start, start + count)
    qkv = projections(shape, bucket, dtype=dtype, device=DEVICE).view(bucket, -1, shape.head_dim)
    q, k, v = qkv.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
    paged = PagedKeys(keys=cache.keys[0], values=cache.values[0], block_table=table, positions=positions)

    found = prefill_attention(q, k, v, paged, num_splits=num_splits)

    context_len = torch.tensor([start + count], device=DEVICE)
    slots = positions + BLOCK_SIZE
    wanted = ChunkPrefillAttention(
        cache, slots=slots, positions=positions, block_table=table, context_len=context_len
    ).attend(0, q, k, v, Scoring())
    assert_same_live(found[:count], wanted[:count], dtype)
    assert found.isfinite().all()
