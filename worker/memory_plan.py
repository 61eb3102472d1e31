"""What a worker will take of its GPU, before it is launched: no GPU is needed and no weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import nn

from worker.capture_forecast import CaptureForecast, forecast_captures
from worker.causal_lm import ModelShape
from worker.config import WorkerConfig
from worker.config_numbers import check_config_numbers
from worker.errors import UnsupportedModel
from worker.graph_memory import FLOAT_BYTES, StepMemory
from worker.graph_runner import num_scratch_blocks, worker_keys
from worker.inputs import MAX_PACKED
from worker.kernels.split_plan import max_partials
from worker.load_causal_lm import load_causal_lm
from worker.model.architecture import SUPPORTED_MODEL_TYPES, DecoderConfig
from worker.model.decoder import Decoder
from worker.model.embedded import EMBEDDED_MODEL
from worker.model.files import ModelFiles
from worker.model.source import resolve_model
from worker.model.weights import list_tensors
from worker.sampling import MAX_LOGIT_BIAS
from worker.sampling_views import NUM_PLACES, NUM_REAL, NUM_WHOLE, WORD_BITS
from worker.shapes import Shapes, choose_dtype, choose_shapes, kv_block_bytes

CONTEXT_BYTES = 700 << 20
"""CUDA's context, loaded kernels and the libraries' workspaces."""
_CUDA = torch.device("cuda", 0)
_META = torch.device("meta")
_NUM_SMS = 132
"""Of a large GPU; smaller ones need less."""
_STORED_BYTES = {"F64": 8, "F32": 4, "I64": 8, "I32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """The KV pool."""

    num_blocks: int
    """All of them."""
    reserved_blocks: int
    """For padding and self-checks; no sequence gets them."""
    block_size: int
    block_bytes: int
    sequences: Mapping[int, int]
    """How many sequences of each tier's full length it holds at once."""

    @property
    def num_bytes(self) -> int:
        """Of the whole pool."""
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """That sequences can hold at once, all together."""
        return (self.num_blocks - self.reserved_blocks) * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of one worker, in bytes."""

    model: str
    implementation: str
    """"native" or "transformers"."""
    dtype: str
    gpu_bytes: int
    context_bytes: int
    weights_bytes: int
    stored_bytes: Mapping[str, int]
    """Of the checkpoint on disk, by type; empty where only the config was looked at."""
    kv: KVPlan
    inputs_bytes: int
    """Static input buffers of all steps, and what fused attention works in."""
    shapes: Shapes
    graphs: CaptureForecast | None
    """None when the worker runs eagerly."""

    @property
    def graph_bytes(self) -> int:
        """Of all graphs that fit."""
        return 0 if self.graphs is None else self.graphs.total_bytes

    @property
    def used_bytes(self) -> int:
        """All of it together."""
        return self.fixed_bytes + self.graph_bytes

    @property
    def fixed_bytes(self) -> int:
        """What is taken before the first graph."""
        return self.context_bytes + self.weights_bytes + self.kv.num_bytes + self.inputs_bytes

    @property
    def fits(self) -> bool:
        """Whether a worker can start at all: the KV pool holds one sequence of the longest tier, and the GPU holds it."""
        return self.kv.sequences[self.shapes.tiers.longest] > 0 and self.fixed_bytes <= self.gpu_bytes


def plan_memory(config: WorkerConfig, gpu_bytes: int, *, context_bytes: int = CONTEXT_BYTES) -> MemoryPlan:
    """Plan for a GPU of `gpu_bytes` that nobody else uses.

    A model on this machine is looked at by its config and the headers of its weights; of a hub id the config alone is
    fetched. Raises ModelLoadError, or ValueError for a configuration that cannot work.
    """
    files = resolve_model(config.model, load_format=_load_format(config), cache_dir=config.cache_dir)
    dtype = choose_dtype(config, "cuda")
    implementation, shape, module = _model_without_weights(config, files, dtype)
    weights = weights_bytes(module)
    free = max(gpu_bytes - context_bytes - weights, 0)
    shapes = choose_shapes(config, shape, _CUDA, dtype, memory=(free, gpu_bytes))
    fused = config.kernels != "torch"
    kv, inputs = _plan_kv(config, shape, shapes), static_input_bytes(shapes) + sampling_bytes(shapes, shape.vocab_size)
    if fused:
        inputs += _workspace_bytes(shape, shapes.buckets.largest)
    graphs = None
    if shapes.has_graphs:
        graphs = forecast_captures(
            worker_keys(shapes.tiers, shapes.buckets, shapes.prefill_buckets),
            StepMemory(shape, dtype, config.block_size, fused=fused),
            free_bytes=max(free - kv.num_bytes - inputs, 0),
            use_pool=config.use_graph_pool,
            max_bytes=config.max_graph_bytes,
        )
    return MemoryPlan(
        model=files.name,
        implementation=implementation,
        dtype=str(dtype).removeprefix("torch."),
        gpu_bytes=gpu_bytes,
        context_bytes=context_bytes,
        weights_bytes=weights,
        stored_bytes=_stored_bytes(files),
        kv=kv,
        inputs_bytes=inputs,
        shapes=shapes,
        graphs=graphs,
    )


def weights_bytes(module: nn.Module) -> int:
    """Of all parameters and buffers; what two names share counts once."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def static_input_bytes(shapes: Shapes) -> int:
    """Of the buffers that steps are filled into, on the device."""
    rows, tokens = shapes.buckets.largest, shapes.prefill_buckets.largest
    table = shapes.tiers.num_blocks(shapes.tiers.longest) * torch.int32.itemsize
    index = torch.int64.itemsize
    return rows * (table + 6 * index) + tokens * 3 * index + table


def sampling_bytes(shapes: Shapes, vocab_size: int) -> int:
    """Of the sampling stage's tables, and of the logits that graphs leave for it."""
    rows, words = shapes.buckets.largest, -(-vocab_size // WORD_BITS)
    seat = vocab_size * torch.int16.itemsize + (2 * words + 2 * MAX_LOGIT_BIAS) * torch.int32.itemsize
    seat += NUM_WHOLE * torch.int64.itemsize + NUM_REAL * torch.float32.itemsize
    logits = max(rows, MAX_PACKED) * vocab_size * FLOAT_BYTES if shapes.has_graphs else 0
    return (rows + 1) * seat + rows * NUM_PLACES * torch.int64.itemsize + logits


def _workspace_bytes(shape: ModelShape, max_rows: int) -> int:
    """Of the fused decode attention; see worker.kernels.decode_workspace."""
    partials = max_partials(max_rows=max_rows, num_kv_heads=shape.num_kv_heads, num_sms=_NUM_SMS)
    partials *= shape.num_heads // shape.num_kv_heads
    return partials * (shape.head_dim + 2) * FLOAT_BYTES + max_rows * shape.num_kv_heads * torch.int32.itemsize


def _load_format(config: WorkerConfig) -> str:
    """A hub id's weights are not fetched, and where there are none the config is enough."""
    path = Path(config.model).expanduser()
    has_weights = path.suffix == ".gguf" or any(path.glob("*.safetensors"))
    return config.load_format if config.model == EMBEDDED_MODEL or has_weights else "dummy"


def _model_without_weights(
    config: WorkerConfig, files: ModelFiles, dtype: torch.dtype
) -> tuple[str, ModelShape, nn.Module]:
    """(implementation, sizes, a module whose tensors have no memory), chosen as a worker would choose."""
    check_config_numbers(files.config)
    if config.model_impl != "transformers" and (
        config.model_impl == "native" or files.config.get("model_type") in SUPPORTED_MODEL_TYPES
    ):
        try:
            decoder_config = DecoderConfig.from_dict(files.config)
            return "native", ModelShape.of(decoder_config), Decoder(decoder_config, dtype=dtype, device=_META)
        except UnsupportedModel:
            if config.model_impl == "native":
                raise
    generic = replace(config, model_impl="transformers", load_format="dummy")
    served = load_causal_lm(generic, files, device=_META, dtype=dtype)
    return served.implementation, served.model.shape, served.model.module


def _plan_kv(config: WorkerConfig, shape: ModelShape, shapes: Shapes) -> KVPlan:
    scratch = num_scratch_blocks(shapes.buckets, shapes.prefill_buckets, config.block_size)
    reserved = 1 + (scratch if shapes.has_graphs else 0)
    usable = max(shapes.num_blocks - reserved, 0)
    return KVPlan(
        num_blocks=shapes.num_blocks,
        reserved_blocks=reserved,
        block_size=config.block_size,
        block_bytes=kv_block_bytes(shape, config.block_size, shapes.dtype),
        sequences={
            tier: min(usable // shapes.tiers.num_blocks(tier), shapes.buckets.largest) for tier in shapes.tiers.lengths
        },
    )


def _stored_bytes(files: ModelFiles) -> dict[str, int]:
    found: Counter[str] = Counter()
    for tensor in list_tensors(files.safetensors).values():
        found[tensor.dtype] += prod(tensor.shape) * _STORED_BYTES.get(tensor.dtype, 1)
    return dict(found)
