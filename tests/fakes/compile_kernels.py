"""Compiles every kernel for Hopper at the shapes of the public models, without a GPU, and prints what came out as JSON.

Run in a process of its own: `python -m tests.fakes.compile_kernels`.
"""

from __future__ import annotations

import json

import torch

from tests.fakes.kernel_inputs import Heads, layout
from tests.fakes.offline_gpu import compiling_for_hopper, empty, resources

SHAPES = {
    "smollm2-135m": (576, 1536, Heads(num_heads=9, num_kv_heads=3, head_dim=64), torch.bfloat16),
    "llama-3.2-1b": (2048, 8192, Heads(num_heads=32, num_kv_heads=8, head_dim=64), torch.bfloat16),
    "qwen2.5-1.5b": (1536, 8960, Heads(num_heads=12, num_kv_heads=2, head_dim=128), torch.float16),
    "llama-2-7b": (4096, 11008, Heads(num_heads=32, num_kv_heads=32, head_dim=128), torch.bfloat16),
    "qwen3-8b": (4096, 12288, Heads(num_heads=32, num_kv_heads=8, head_dim=128, has_norms=True), torch.bfloat16),
    "head of 80": (2560, 6912, Heads(num_heads=32, num_kv_heads=32, head_dim=80), torch.bfloat16),
    "head of 256": (2048, 8192, Heads(num_heads=8, num_kv_heads=1, head_dim=256), torch.float32),
}


def compile_shape(hidden: int, intermediate: int, heads: Heads, dtype: torch.dtype) -> None:
    """Launch every kernel of one decode step and of one prefill layer."""
    from worker.kernels.decode_attention import decode_attention
    from worker.kernels.decode_workspace import DecodeWorkspace
    from worker.kernels.prefill_attention import PagedKeys, prefill_attention
    from worker.kernels.rms_norm import rms_norm
    from worker.kernels.rope_cache import rope_and_cache
    from worker.kernels.silu_mul import silu_mul

    rms_norm(empty(2, hidden, dtype=dtype), empty(hidden, dtype=dtype), 1e-5)
    rms_norm(empty(2, hidden, dtype=dtype), empty(hidden, dtype=dtype), 1e-5, residual=empty(2, hidden, dtype=dtype))
    silu_mul(empty(2, 2 * intermediate, dtype=dtype))
    qkv_layout = layout(heads, dtype=dtype, device=torch.device("cpu"), num_positions=16)
    qkv, pool = (
        empty(2, heads.total * heads.head_dim, dtype=dtype),
        empty(4, 16, heads.num_kv_heads, heads.head_dim, dtype=dtype),
    )
    whole = torch.zeros(2, dtype=torch.int64)
    rope_and_cache(qkv, qkv_layout, whole, whole, pool, pool)
    workspace = DecodeWorkspace(
        max_rows=2,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        device=torch.device("cpu"),
    )
    tables = torch.zeros(2, 64, dtype=torch.int32)
    q, k, v = qkv_layout.split(qkv)
    prefill_attention(q, k, v)
    prefill_attention(q, k, v, PagedKeys(keys=pool, values=pool, block_table=tables[0], positions=whole))
    for chosen in (qkv_layout, None):
        decode_attention(qkv_layout.split(qkv), pool, pool, tables, whole, workspace, layout=chosen)


def main() -> None:
    with compiling_for_hopper() as compiled:
        from worker.kernels.greedy import RowState, greedy, pick_tokens

        for shape in SHAPES.values():
            compile_shape(*shape)
        whole = torch.zeros(2, dtype=torch.int64)
        state = RowState(last_tokens=whole, positions=whole, live=whole, sources=whole)
        for logits in (empty(2, 32_000), empty(2, 151_936, dtype=torch.float32)):
            greedy(logits)
            greedy(logits, state)
        pick_tokens(whole, whole, whole)
        print(json.dumps([resources(kernel) for kernel in compiled]))


if __name__ == "__main__":
    main()
