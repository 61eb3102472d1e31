"""Prefill attention on a real GPU, at the head shapes of the public models, against torch in single precision."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from worker.kernels.device import has_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and has_triton()), reason="needs a CUDA device and triton"),
]

CUDA = torch.device("cuda")
BLOCK_SIZE = 16
HEADS = [(9, 3, 64), (32, 8, 64), (12, 2, 128), (32, 32, 128), (8, 2, 96), (8, 1, 256)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Every query against the keys up to its own position, in single precision."""
    q, k, v = (tensor.float().transpose(0, 1)[None] for tensor in (q, k, v))
    mask = torch.arange(k.shape[2], device=CUDA) <= positions[:, None]
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).to(dtype)


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = float((found.float() - wanted).norm() / wanted.norm())
    assert error < TOLERANCE[found.dtype], error


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("count", [1, 16, 130, 1024])
def test_fresh_prompts(heads: tuple[int, int, int], count: int, dtype: torch.dtype) -> None:
    from worker.kernels.prefill_attention import prefill_attention

    num_heads, num_kv_heads, head_dim = heads
    qkv = normal(count, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, seed=1)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    assert_near(prefill_attention(q, k, v), expected(q, k, v, torch.arange(count, device=CUDA)))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("start", "count", "bucket"), [(1000, 24, 32), (16, 256, 256), (0, 100, 128), (4000, 1, 16)])
def test_chunks_over_the_pool(heads: tuple[int, int, int], start: int, count: int, bucket: int) -> None:
    from worker.kernels.prefill_attention import PagedKeys, prefill_attention

    num_heads, num_kv_heads, head_dim = heads
    dtype, width = torch.bfloat16, -(-(start + count) // BLOCK_SIZE) + 3
    table = torch.randperm(width, generator=torch.Generator().manual_seed(2)).to(CUDA, torch.int32) + 1
    keys, values = (normal(width + 1, BLOCK_SIZE, num_kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (3, 4))
    places = torch.arange(width * BLOCK_SIZE, device=CUDA)
    slots = table[places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE
    for pool in (keys, values):
        pool.flatten(0, 1)[slots[start + count :]] = torch.nan
    k, v = (pool.flatten(0, 1)[slots[: start + count]] for pool in (keys, values))
    positions = torch.zeros(bucket, dtype=torch.int64, device=CUDA)
    positions[:count] = torch.arange(start, start + count, device=CUDA)
    q = normal(bucket, num_heads, head_dim, dtype=dtype, seed=5)
    paged = PagedKeys(keys=keys, values=values, block_table=table, positions=positions)

    found = prefill_attention(q, k[:bucket], v[:bucket], paged)

    assert_near(found[:count], expected(q[:count], k, v, positions[:count]))
    assert found.isfinite().all()
