"""Turns a loaded model deterministic, or says why it cannot be."""

from __future__ import annotations

from dataclasses import replace

import torch

from worker.causal_lm import ModelShape, NativeCausalLM
from worker.config import WorkerConfig
from worker.kernels.build_processes import BuildProcesses
from worker.kernels.device import has_triton
from worker.kv_cache import KVCache
from worker.load_causal_lm import ServedModel
from worker.step_kernels import StepKernels


def deterministic_model(
    served: ServedModel, config: WorkerConfig, compilers: BuildProcesses | None = None
) -> ServedModel:
    """The same model, computed in one order. Raises ValueError for what has no such order, ModelLoadError for a device."""
    if not isinstance(served.model, NativeCausalLM):
        raise ValueError(f"deterministic needs the native decoder, and this model runs on {served.implementation}")
    decoder = served.model.decoder
    device, dtype = decoder.embedding.device, decoder.embedding.dtype
    if device.type == "cuda":
        if config.kernels == "torch" or not has_triton():
            raise ValueError("deterministic on CUDA needs kernels 'triton' or 'auto', and the triton package")
        from worker.deterministic.triton_model import TritonFixedOrderCausalLM  # triton takes a second to import

        return replace(served, model=TritonFixedOrderCausalLM(decoder, compilers))
    if dtype != torch.float32:
        raise ValueError(f"deterministic on the CPU needs dtype 'float32', not {str(dtype).removeprefix('torch.')!r}")
    from worker.deterministic.cpu_model import CpuFixedOrderCausalLM

    return replace(served, model=CpuFixedOrderCausalLM(decoder))


def deterministic_kernels(shape: ModelShape, kv_cache: KVCache, *, max_rows: int, max_tokens: int) -> StepKernels:
    """For a model of `deterministic_model`: decode steps of up to `max_rows` rows of up to `max_tokens` tokens."""
    if kv_cache.storage.device.type == "cuda":
        from worker.deterministic.triton_kernels import TritonFixedOrderKernels

        return TritonFixedOrderKernels(kv_cache, num_heads=shape.num_heads, max_rows=max_rows, max_tokens=max_tokens)
    from worker.deterministic.cpu_kernels import CpuFixedOrderKernels

    return CpuFixedOrderKernels(kv_cache, shape)
