"""What is fixed when a worker starts: device, types, tiers, buckets, and the size of the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.causal_lm import ModelShape
from worker.config import WorkerConfig
from worker.graph_runner import num_scratch_blocks
from worker.kv_cache import block_bytes
from worker.tiers import BucketTable, TierTable, default_buckets, default_tiers

CPU_KV_BYTES = 512 << 20
DEFAULT_MAX_BATCH = {"cpu": 16, "cuda": 256}
DEFAULT_PREFILL_CHUNK = {"cpu": 512, "cuda": 1024}
DEFAULT_BUSY_CHUNK = {"cpu": 128, "cuda": 256}


@dataclass(frozen=True, slots=True)
class Shapes:
    """One worker's fixed shapes."""

    device: torch.device
    dtype: torch.dtype
    tiers: TierTable
    buckets: BucketTable
    prefill_buckets: BucketTable
    prefill_chunk_when_busy: int
    num_blocks: int
    """Of the KV pool, with the padding block and the blocks of self-checks."""
    has_graphs: bool


def choose_device(config: WorkerConfig) -> torch.device:
    """The configured device; "auto" is the GPU if there is one. Raises ValueError when CUDA is asked for and missing."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no CUDA device")
    is_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def choose_dtype(config: WorkerConfig, device_type: str) -> torch.dtype:
    """The configured type; "auto" is bfloat16 on CUDA, float32 on the CPU."""
    if config.dtype == "auto":
        return torch.bfloat16 if device_type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]


def choose_shapes(
    config: WorkerConfig,
    model: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    memory: tuple[int, int] | None = None,
) -> Shapes:
    """Fill in what the configuration leaves open. Raises ValueError naming what does not fit.

    `memory` is (free, total) bytes of a CUDA device with the weights on it; None asks the device.
    """
    limit = model.max_position_embeddings
    max_model_len = config.max_model_len or limit
    if max_model_len > limit:
        raise ValueError(f"max_model_len is {max_model_len}, the model's limit is {limit}")
    tiers = TierTable(config.tiers or default_tiers(max_model_len), config.block_size)
    if tiers.longest != max_model_len:
        raise ValueError(f"the last tier is {tiers.longest}, must be max_model_len, {max_model_len}")
    max_batch = config.max_batch or DEFAULT_MAX_BATCH[device.type]
    buckets = BucketTable(config.buckets or default_buckets(max_batch))
    if buckets.largest != max_batch:
        raise ValueError(f"the largest bucket is {buckets.largest}, must be max_batch, {max_batch}")
    prefill_buckets = BucketTable(default_buckets(config.prefill_chunk or DEFAULT_PREFILL_CHUNK[device.type]))
    has_graphs = config.graphs == "fake" or (config.graphs == "auto" and device.type == "cuda")
    extra = 1 + (num_scratch_blocks(buckets, prefill_buckets, config.block_size) if has_graphs else 0)
    num_blocks = _num_blocks(config, model, tiers, buckets, device, dtype, extra=extra, memory=memory)
    busy = _busy_chunk(config, device, prefill_buckets.largest)
    return Shapes(device, dtype, tiers, buckets, prefill_buckets, busy, num_blocks, has_graphs)


def _busy_chunk(config: WorkerConfig, device: torch.device, chunk: int) -> int:
    """Whole blocks, at least one, and no more than a chunk has."""
    default = max(DEFAULT_BUSY_CHUNK[device.type] // config.block_size, 1) * config.block_size
    return min(config.prefill_chunk_when_busy or default, chunk)


def _num_blocks(
    config: WorkerConfig,
    model: ModelShape,
    tiers: TierTable,
    buckets: BucketTable,
    device: torch.device,
    dtype: torch.dtype,
    *,
    extra: int,
    memory: tuple[int, int] | None,
) -> int:
    per_block = kv_block_bytes(model, config.block_size, dtype)
    longest = tiers.num_blocks(tiers.longest)
    available = config.kv_cache_bytes or _default_kv_bytes(config, device, per_block * (longest + extra), memory)
    # More blocks than every row at its longest could never be used.
    return max(min(available // per_block, buckets.largest * longest + extra), 2)


def kv_block_bytes(model: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block of this model."""
    return block_bytes(
        num_layers=model.num_layers,
        block_size=block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )


def _default_kv_bytes(
    config: WorkerConfig, device: torch.device, one_sequence: int, memory: tuple[int, int] | None
) -> int:
    if device.type == "cuda":
        free, total = memory or torch.cuda.mem_get_info(device)
        return max(int(free - (1 - config.gpu_memory_fraction) * total), one_sequence)
    return max(CPU_KV_BYTES, one_sequence)
