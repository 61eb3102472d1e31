"""How fast this GPU reads memory, and how many bytes a decode step has to read."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from bench.clocks import device_ms
from worker.kernels.matrix_kind import MatrixKind
from worker.model.architecture import DecoderConfig

BUFFER_BYTES = 8 << 30
SIZES = ((4096, 4), (8192, 4), (8192, 8), (16384, 8))
"""Words that a program reads, and its warps."""


@triton.jit
def _read(words: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:  # noqa: N803 - as constants of kernels are
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(words + place, eviction_policy="evict_first"), axis=0))


def read_bytes_per_s(device: torch.device) -> float:
    """The best of several ways to read a buffer of 8 GiB, once, and nothing else."""
    words = torch.randint(-(2**31), 2**31, (BUFFER_BYTES // 4,), dtype=torch.int32, device=device)
    out = torch.empty(len(words) // min(block for block, _ in SIZES), dtype=torch.int32, device=device)
    best = 0.0
    for block, num_warps in SIZES:

        def read(block: int = block, num_warps: int = num_warps) -> None:
            _read[(len(words) // block,)](words, out, BLOCK=block, num_warps=num_warps)

        best = max(best, BUFFER_BYTES / (1e-3 * device_ms(read, rounds=3, blocks=5)))
    return best


def matrix_bytes(config: DecoderConfig, itemsize: int = 2) -> dict[MatrixKind, int]:
    """Of one layer's matrices, and of the output projection."""
    from worker.model.matrix_tiles import matrix_shapes

    doubled = {"gate_up": 2}
    return {kind: doubled.get(kind, 1) * size * out * itemsize for kind, (size, out) in matrix_shapes(config).items()}


def cache_bytes(config: DecoderConfig, batch: int, context: int, itemsize: int = 2) -> int:
    """Keys and values of all layers that a step of `batch` rows at `context` reads."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * batch * context * itemsize


def step_bytes(config: DecoderConfig, batch: int, context: int) -> int:
    """What a step must read at least: every weight once, and the cache."""
    matrices: dict[Any, int] = dict(matrix_bytes(config))
    head = matrices.pop("head")
    return config.num_layers * sum(matrices.values()) + head + cache_bytes(config, batch, context)
