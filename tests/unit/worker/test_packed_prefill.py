from __future__ import annotations

import pytest
import torch

from worker.attention.packed_prefill import PackedPrefillAttention
from worker.attention.prefill import attend_causal
from worker.kv_cache import KVCache

HEADS, KV_HEADS, DIM = 4, 2, 8


def pool() -> KVCache:
    return KVCache(
        num_layers=1,
        num_blocks=16,
        block_size=4,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("counts", [[5], [1, 1, 1], [7, 2, 11], [4, 16]])
def test_each_prompt_sees_itself_alone_and_padding_is_a_prompt_of_its_own(
    counts: list[int], window: int | None
) -> None:
    torch.manual_seed(0)
    bucket = 32
    q = torch.randn(bucket, HEADS, DIM)
    k, v = torch.randn(2, bucket, KV_HEADS, DIM)
    ends = torch.tensor(counts).cumsum(0)
    offsets = torch.tensor([0, *ends.tolist(), bucket, bucket], dtype=torch.int32)
    slots = torch.zeros(bucket, dtype=torch.int64)
    slots[: int(ends[-1])] = torch.arange(4, 4 + int(ends[-1]))
    cache = pool()
    out = PackedPrefillAttention(cache, slots=slots, offsets=offsets)(0, q, k, v, sliding_window=window)
    for end, count in zip(ends.tolist(), counts, strict=True):
        span = slice(end - count, end)
        mask = torch.ones(count, count, dtype=torch.bool).tril()
        if window is not None:
            mask = mask.triu(1 - window)
        assert torch.allclose(out[span], attend_causal(q[span], k[span], v[span], mask, None), atol=1e-6)
    assert out.isfinite().all()
    assert torch.equal(cache.keys[0].flatten(0, 1)[4 : 4 + int(ends[-1])], k[: int(ends[-1])])
