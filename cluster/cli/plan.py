"""`graphpool plan`: what a worker takes of its GPU, before it is launched."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli import options
from cluster.cli.byte_sizes import parse_bytes
from cluster.cli.options import ENGINE, MODEL, Device, Dtype, Graphs, LoadFormat
from cluster.cli.running import fail, one_sentence_errors, usage_errors
from cluster.cli.worker_options import worker_config

if TYPE_CHECKING:
    from worker.config import WorkerConfig

DEFAULT_GPU_BYTES = 80 * 10**9


class ModelImpl(StrEnum):
    """Whose model code runs."""

    AUTO = "auto"
    NATIVE = "native"
    TRANSFORMERS = "transformers"


class Kernels(StrEnum):
    """Whose kernels run between matrix products."""

    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"


def plan(
    model: Annotated[
        str,
        typer.Argument(help="The embedded smollm2-135m, a directory, a config.json, a .gguf file, or a hub id."),
    ] = "smollm2-135m",
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the GPU, such as 141GB or 24GiB. Default: that of this machine's GPU, or 80GB.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also build the worker on this machine's GPU and compare.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    load_format: options.LoadFormatOption = LoadFormat.AUTO,
    model_impl: Annotated[
        ModelImpl, typer.Option(help="The native decoder, or transformers' own code.", rich_help_panel=MODEL)
    ] = ModelImpl.AUTO,
    dtype: options.DtypeOption = Dtype.AUTO,
    cache_dir: options.CacheDir = None,
    max_model_len: options.MaxModelLen = None,
    tiers: options.Tiers = None,
    max_batch: options.MaxBatch = None,
    buckets: options.Buckets = None,
    prefill_chunk: options.PrefillChunk = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a KV block.", rich_help_panel=ENGINE)] = 16,
    kv_cache_mib: options.KvCacheMib = None,
    gpu_memory_fraction: options.GpuMemoryFraction = 0.85,
    graphs: options.GraphsOption = Graphs.AUTO,
    kernels: Annotated[
        Kernels, typer.Option(help="auto: fused Triton kernels. torch: torch's own.", rich_help_panel=ENGINE)
    ] = Kernels.AUTO,
    graph_pool: Annotated[
        bool, typer.Option(help="One pool of memory for all graphs, or one for each.", rich_help_panel=ENGINE)
    ] = True,
    max_graph_mib: Annotated[
        int | None, typer.Option(min=1, help="Cap on the memory of all graphs, in MiB.", rich_help_panel=ENGINE)
    ] = None,
) -> None:
    """Show weights, KV pool and every graph in bytes, and which graphs fit. Needs no GPU and reads no weights.

    The options are those of `serve` and `worker`. Exit code 1: a worker could not start like this.
    """
    config = worker_config(
        model=model,
        load_format=load_format,
        device=Device.AUTO,
        dtype=dtype,
        cache_dir=cache_dir,
        max_model_len=max_model_len,
        tiers=tiers,
        max_batch=max_batch,
        buckets=buckets,
        prefill_chunk=prefill_chunk,
        kv_cache_mib=kv_cache_mib,
        gpu_memory_fraction=gpu_memory_fraction,
        max_waiting=1024,
        graphs=graphs,
        threads=None,
    )
    with usage_errors():
        config = replace(
            config,
            model_impl=model_impl.value,
            kernels=kernels.value,
            block_size=block_size,
            use_graph_pool=graph_pool,
            max_graph_bytes=None if max_graph_mib is None else max_graph_mib << 20,
        )
        wanted = None if gpu_memory is None else parse_bytes(gpu_memory)
    with one_sentence_errors():
        _plan(config, wanted, measure=measure, as_json=as_json)


def _plan(config: WorkerConfig, wanted: int | None, *, measure: bool, as_json: bool) -> None:
    import torch
    from rich.console import Console

    from cluster.cli.plan_tables import plan_report, plan_values
    from worker.memory_plan import plan_memory

    if measure and not torch.cuda.is_available():
        fail("--measure needs a GPU, and torch finds none here")
    measured = None
    if measure:
        from worker.memory_measure import measure_memory

        measured = measure_memory(config)
        wanted = measured.gpu_bytes
    found = plan_memory(config, wanted or _gpu_here() or DEFAULT_GPU_BYTES)
    if as_json:
        json.dump(plan_values(found, measured), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        Console().print(plan_report(found, measured))
    if not found.fits:
        raise typer.Exit(1)


def _gpu_here() -> int | None:
    import torch

    return int(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else None
