"""From the options of `serve` and `worker` to a worker's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.options import Device, Dtype, Graphs, LoadFormat, integers
from cluster.cli.running import usage_errors

if TYPE_CHECKING:
    from worker.config import WorkerConfig


def worker_config(
    *,
    model: str,
    load_format: LoadFormat,
    device: Device,
    dtype: Dtype,
    cache_dir: Path | None,
    max_model_len: int | None,
    tiers: str | None,
    max_batch: int | None,
    buckets: str | None,
    prefill_chunk: int,
    kv_cache_mib: int | None,
    gpu_memory_fraction: float,
    max_waiting: int,
    graphs: Graphs,
    threads: int | None,
) -> WorkerConfig:
    """Build it; a combination that cannot be is a usage error."""
    from worker.config import WorkerConfig

    with usage_errors():
        return WorkerConfig(
            model=model,
            load_format=load_format.value,
            device=device.value,
            dtype=dtype.value,
            cache_dir=cache_dir,
            max_model_len=max_model_len,
            tiers=None if tiers is None else tuple(integers(tiers)),
            max_batch=max_batch,
            buckets=None if buckets is None else tuple(integers(buckets)),
            prefill_chunk=prefill_chunk,
            kv_cache_bytes=None if kv_cache_mib is None else kv_cache_mib << 20,
            gpu_memory_fraction=gpu_memory_fraction,
            max_waiting=max_waiting,
            graphs=graphs.value,
            cpu_threads=threads,
        )
