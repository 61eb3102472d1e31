"""From a configuration to a running engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.block_pool import BlockPool
from worker.causal_lm import NativeCausalLM
from worker.config import WorkerConfig
from worker.engine import Engine, EngineParts
from worker.engine_thread import EngineThread
from worker.kv_cache import KVCache, block_bytes
from worker.load import EngineInfo
from worker.model.load import LoadedModel, load_model
from worker.model.files import ModelFiles
from worker.model.source import resolve_model
from worker.runner import EagerRunner
from worker.scheduler import Scheduler
from worker.service import EventSink
from worker.text.processor import TextProcessor
from worker.tiers import BucketTable, TierTable, default_buckets, default_tiers

log = logging.getLogger(__name__)

CPU_KV_BYTES = 512 << 20
DEFAULT_MAX_BATCH = {"cpu": 16, "cuda": 256}

Progress = Callable[[str, int, int], None]
"""(what, done, total); total 0 = not known."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A running engine and the text side of its model; `text` is None without a tokenizer."""

    engine: EngineThread
    text: TextProcessor | None
    generation_defaults: dict[str, float]
    """Sampling defaults from the model's generation_config.json."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What is fixed when a worker starts."""

    device: torch.device
    dtype: torch.dtype
    tiers: TierTable
    buckets: BucketTable
    prefill_buckets: BucketTable
    num_blocks: int


def build_engine(
    config: WorkerConfig,
    sink: EventSink,
    *,
    progress: Progress | None = None,
    on_death: Callable[[BaseException], None] | None = None,
) -> BuiltEngine:
    """Load the model and start its engine. Raises ModelLoadError, or ValueError for a configuration that cannot work."""
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    files = resolve_model(config.model, load_format=config.load_format, cache_dir=config.cache_dir, progress=progress)
    device = choose_device(config)
    model = load_model(
        files,
        dtype=choose_dtype(config, device),
        device=device,
        load_format=config.load_format,
        seed=config.seed,
        progress=progress,
    )
    text = TextProcessor.from_files(files) if files.has_tokenizer else None
    engine = create_engine(config, files, model, text)
    return BuiltEngine(EngineThread(engine, sink, on_death=on_death), text, model.generation_defaults)


def create_engine(config: WorkerConfig, files: ModelFiles, model: LoadedModel, text: TextProcessor | None) -> Engine:
    """Put an engine together around a loaded model; nothing runs yet."""
    shapes = choose_shapes(config, model)
    kv_cache = KVCache(
        num_layers=model.config.num_layers,
        num_blocks=shapes.num_blocks,
        block_size=config.block_size,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=shapes.dtype,
        device=shapes.device,
    )
    runner = EagerRunner(
        NativeCausalLM(model.decoder),
        kv_cache,
        shapes.tiers,
        max_batch=shapes.buckets.largest,
        prefill_chunk=shapes.prefill_buckets.largest,
        eos_token_ids=model.eos_token_ids,
    )
    scheduler = Scheduler(
        tiers=shapes.tiers,
        buckets=shapes.buckets,
        prefill_buckets=shapes.prefill_buckets,
        pool=BlockPool(shapes.num_blocks),
        max_waiting=config.max_waiting,
        max_prefill_segments=runner.max_prefill_segments,
    )
    return Engine(
        EngineParts(
            info=describe(files, model, shapes, text),
            scheduler=scheduler,
            runner=runner,
            kv_cache=kv_cache,
            decode=None if text is None else text.decode,
            clock=time.monotonic,
        )
    )


def choose_device(config: WorkerConfig) -> torch.device:
    """The configured device; "auto" is the GPU if there is one. Raises ValueError when CUDA is asked for and missing."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no CUDA device")
    is_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def choose_dtype(config: WorkerConfig, device: torch.device) -> torch.dtype:
    """The configured type; "auto" is bfloat16 on CUDA, float32 on the CPU."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]


def choose_shapes(config: WorkerConfig, model: LoadedModel) -> Shapes:
    """Tiers, buckets and the size of the KV pool. Raises ValueError naming what does not fit."""
    weight = next(model.decoder.parameters())
    device, dtype = weight.device, weight.dtype
    limit = model.config.max_position_embeddings
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
    per_block = block_bytes(
        num_layers=model.config.num_layers,
        block_size=config.block_size,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=dtype,
    )
    available = config.kv_cache_bytes or _default_kv_bytes(
        config, device, per_block * (tiers.num_blocks(max_model_len) + 1)
    )
    # More blocks than every row at its longest could never be used.
    num_blocks = min(available // per_block, max_batch * tiers.num_blocks(max_model_len) + 1)
    return Shapes(device, dtype, tiers, buckets, BucketTable(default_buckets(config.prefill_chunk)), max(num_blocks, 2))


def describe(files: ModelFiles, model: LoadedModel, shapes: Shapes, text: TextProcessor | None) -> EngineInfo:
    """What clients and routers may know about the engine."""
    return EngineInfo(
        model=files.name,
        architecture=files.config["architectures"][0]
        if files.config.get("architectures")
        else files.config["model_type"],
        max_model_len=shapes.tiers.longest,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.eos_token_ids,
        tiers=shapes.tiers.lengths,
        buckets=shapes.buckets.sizes,
        dtype=str(shapes.dtype).removeprefix("torch."),
        device=str(shapes.device),
        has_tokenizer=text is not None,
        has_chat_template=text is not None and text.has_chat_template,
    )


def _default_kv_bytes(config: WorkerConfig, device: torch.device, one_sequence: int) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(int(free - (1 - config.gpu_memory_fraction) * total), one_sequence)
    return max(CPU_KV_BYTES, one_sequence)
