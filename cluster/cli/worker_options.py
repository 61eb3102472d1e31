"""From the options of `serve` and `worker` to a worker's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    prefill_chunk: int | None,
    kv_cache_mib: int | None,
    gpu_memory_fraction: float,
    max_waiting: int,
    graphs: Graphs,
    threads: int | None,
    deterministic: bool = False,
    served_model_name: str = "",
    settings: Sequence[str] = (),
) -> WorkerConfig:
    """Build it; a combination that cannot be is a usage error."""
    from worker.config import WorkerConfig

    with usage_errors():
        config = WorkerConfig(
            model=model,
            served_model_name=served_model_name,
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
            deterministic=deterministic,
            cpu_threads=threads,
        )
        return replace(config, **parse_settings(settings))


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs of WorkerConfig's fields; values are read as YAML. Raises ValueError naming what is wrong."""
    import yaml

    from worker.config import WorkerConfig
    from worker.field_values import field_value

    names = sorted(entry.name for entry in fields(WorkerConfig))
    found: dict[str, Any] = {}
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator or not text:
            raise ValueError(f"--set {setting}: expected NAME=VALUE")
        if name not in names:
            raise ValueError(f"--set {setting}: there is no {name!r}; there are {', '.join(names)}")
        try:
            value = text if name == "model" else yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise ValueError(f"--set {setting}: the value cannot be read as YAML") from None
        found[name] = field_value(WorkerConfig, name, value)
    return found
