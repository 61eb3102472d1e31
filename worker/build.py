"""From a configuration to a running engine."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from worker.bit_flips import BitFlips
from worker.block_pool import BlockPool
from worker.config import WorkerConfig
from worker.deterministic.mode import deterministic_kernels, deterministic_model
from worker.engine import Engine, EngineParts, Hold, hold_nothing
from worker.engine_thread import EngineThread
from worker.faults import Faults
from worker.faulty_runner import FaultyRunner
from worker.graph_runner import GraphOptions, GraphRunner
from worker.graphs.backend import backend_for
from worker.kernels.build_processes import BuildProcesses, start_build_processes
from worker.kernels.cache_key import hash_compiler_ahead
from worker.kv_cache import KVCache
from worker.load import EngineInfo
from worker.load_causal_lm import ServedModel, load_causal_lm
from worker.memory_errors import memory_named
from worker.model.files import ModelFiles
from worker.model.progress import Progress
from worker.model.source import resolve_model
from worker.prefix_cache import PrefixCache
from worker.runner import EagerRunner, Runner
from worker.scheduler import Scheduler, StepCost
from worker.service import EventSink
from worker.shapes import Shapes, choose_device, choose_dtype, choose_shapes
from worker.step_cost import BytesMoved
from worker.step_kernels import StepKernels, choose_kernels
from worker.text.processor import TextProcessor
from worker.weight_check import weight_check_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A running engine and the text side of its model; `text` is None without a tokenizer."""

    engine: EngineThread
    text: TextProcessor | None
    generation_defaults: dict[str, float]
    """Sampling defaults from the model's generation_config.json."""


def build_engine(
    config: WorkerConfig,
    sink: EventSink,
    *,
    progress: Progress | None = None,
    on_death: Callable[[BaseException], None] | None = None,
    faults: Faults | None = None,
    hold_s: Hold = hold_nothing,
    on_phase: Callable[[str], None] | None = None,
    compilers: BuildProcesses | None = None,
) -> BuiltEngine:
    """Load the model and start its engine. Raises ModelLoadError, or ValueError for a configuration that cannot work.

    With `faults`, every step meets those that are armed. `hold_s`: see worker.engine.EngineParts. `on_phase` is told the
    name of each part of the work when it is done. `compilers` build kernels, and are closed when those are built, or the
    start fails; on a GPU, some are started here if none are given.
    """
    over = on_phase or (lambda _: None)
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    with contextlib.ExitStack() as on_failure:
        if compilers is not None:
            on_failure.callback(compilers.close)
        files = resolve_model(
            config.model, load_format=config.load_format, cache_dir=config.cache_dir, progress=progress
        )
        device = choose_device(config)
        dtype = choose_dtype(config, device.type)
        if compilers is None and (compilers := start_compilers(config, device)) is not None:
            on_failure.callback(compilers.close)
        over("device")
        with memory_named(config.model):
            served = load_causal_lm(config, files, device=device, dtype=dtype, progress=progress)
        over("weights")
        text = TextProcessor.from_files(files) if files.has_tokenizer else None
        over("text")
        with memory_named(config.model):
            engine = create_engine(config, files, served, text, hold_s=hold_s, compilers=compilers)
        over("engine")
        if isinstance(engine.runner, GraphRunner):
            log.info("%d kernels are built", engine.runner.build_kernels(compilers))
        elif compilers is not None:
            compilers.close()
        over("kernels")
        if faults is not None:
            engine.runner = FaultyRunner(engine.runner, engine.kv_cache, faults)
        if config.capture == "startup":
            prepare(engine, progress)
        thread = EngineThread(engine, sink, on_death=on_death)
        on_failure.pop_all()
    if faults is not None:
        faults.on_flip = BitFlips(served.model.module, thread.between_steps)
    return BuiltEngine(thread, text, served.generation_defaults)


def start_compilers(config: WorkerConfig, device: torch.device) -> BuildProcesses | None:
    """Processes for kernels of a worker on `device`; None where it has none to build, or builds them itself."""
    if device.type != "cuda" or config.kernels == "torch":
        return None
    compilers = start_build_processes()
    hash_compiler_ahead()
    return compilers


def prepare(engine: Engine, progress: Progress | None) -> None:
    """Capture every graph before serving, and say how far it is and what memory the graphs have taken."""
    total = engine.runner.num_to_prepare
    while engine.prepare_next():
        graphs, left = engine.graph_snapshot(), engine.runner.num_to_prepare
        if progress is not None:
            progress(f"capturing graphs, {graphs.pool_bytes >> 20} MiB", total - left, total)


def create_engine(
    config: WorkerConfig,
    files: ModelFiles,
    served: ServedModel,
    text: TextProcessor | None,
    *,
    hold_s: Hold = hold_nothing,
    compilers: BuildProcesses | None = None,
) -> Engine:
    """Put an engine together around a loaded model; nothing runs yet."""
    if config.deterministic:
        served = deterministic_model(served, config, compilers)
    weight = next(served.model.module.parameters())
    shapes = choose_shapes(config, served.model.shape, weight.device, weight.dtype)
    kv_cache = create_kv_cache(config, served, shapes)
    pool = BlockPool(shapes.num_blocks)
    kernels = create_kernels(config, served, shapes, kv_cache)
    runner = create_runner(config, served, shapes, kv_cache, kernels, pool)
    cost = step_cost(served, shapes) if kernels.reads_full_width else None
    return Engine(
        EngineParts(
            info=replace(
                describe(files, served, shapes, text),
                model=config.served_model_name or files.name,
                is_deterministic=config.deterministic,
            ),
            scheduler=create_scheduler(config, shapes, pool, runner, cost),
            runner=runner,
            kv_cache=kv_cache,
            decode=None if text is None else text.decode,
            clock=time.monotonic,
            hold_s=hold_s,
            weight_check=weight_check_of(served.model.module, interval_s=config.weight_check_interval_s),
        )
    )


def create_scheduler(
    config: WorkerConfig, shapes: Shapes, pool: BlockPool, runner: Runner, cost: StepCost | None
) -> Scheduler:
    """With a prefix cache over the pool, unless it is off. `cost`: see Scheduler.step_cost."""
    return Scheduler(
        tiers=shapes.tiers,
        buckets=shapes.buckets,
        prefill_buckets=shapes.prefill_buckets,
        pool=pool,
        max_waiting=config.max_waiting,
        max_prefill_segments=runner.max_prefill_segments,
        packs_parts=runner.packs_parts,
        step_cost=cost,
        prefill_chunk_when_busy=shapes.prefill_chunk_when_busy,
        prefix_cache=PrefixCache(pool, config.block_size) if config.prefix_cache else None,
        mix_tenants=config.mix_tenants,
    )


def create_kv_cache(config: WorkerConfig, served: ServedModel, shapes: Shapes) -> KVCache:
    """The pool's memory."""
    model = served.model.shape
    return KVCache(
        num_layers=model.num_layers,
        num_blocks=shapes.num_blocks,
        block_size=config.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=shapes.dtype,
        device=shapes.device,
    )


def create_runner(
    config: WorkerConfig,
    served: ServedModel,
    shapes: Shapes,
    kv_cache: KVCache,
    kernels: StepKernels,
    pool: BlockPool,
) -> Runner:
    """The eager runner, or the graph runner around it."""
    eager = EagerRunner(
        served.model,
        kv_cache,
        shapes.tiers,
        max_batch=shapes.buckets.largest,
        prefill_chunk=shapes.prefill_buckets.largest,
        eos_token_ids=served.eos_token_ids,
        kernels=kernels,
    )
    if not shapes.has_graphs:
        return eager
    options = GraphOptions(
        use_pool=config.use_graph_pool, max_bytes=config.max_graph_bytes, two_pass=config.capture == "startup"
    )
    backend = backend_for(shapes.device)
    return GraphRunner(eager, pool, shapes.buckets, shapes.prefill_buckets, backend, options=options)


def create_kernels(config: WorkerConfig, served: ServedModel, shapes: Shapes, kv_cache: KVCache) -> StepKernels:
    """What computes a step around the model's layers."""
    if config.deterministic:
        return deterministic_kernels(
            served.model.shape, kv_cache, max_rows=shapes.buckets.largest, max_tokens=shapes.tiers.longest
        )
    return choose_kernels(
        config.kernels, kv_cache, num_heads=served.model.shape.num_heads, max_rows=shapes.buckets.largest
    )


def step_cost(served: ServedModel, shapes: Shapes) -> BytesMoved:
    """What decode steps cost by tier, where their attention reads its full width."""
    weights = sum(weight.nbytes for weight in served.model.module.parameters())
    return BytesMoved.of(served.model.shape, weights, shapes.dtype.itemsize)


def describe(files: ModelFiles, served: ServedModel, shapes: Shapes, text: TextProcessor | None) -> EngineInfo:
    """What clients and routers may know about the engine."""
    architectures = files.config.get("architectures") or [files.config["model_type"]]
    return EngineInfo(
        model=files.name,
        architecture=architectures[0],
        max_model_len=shapes.tiers.longest,
        vocab_size=served.model.shape.vocab_size,
        eos_token_ids=served.eos_token_ids,
        tiers=shapes.tiers.lengths,
        buckets=shapes.buckets.sizes,
        dtype=str(shapes.dtype).removeprefix("torch."),
        device=str(shapes.device),
        has_tokenizer=text is not None,
        has_chat_template=text is not None and text.has_chat_template,
    )
