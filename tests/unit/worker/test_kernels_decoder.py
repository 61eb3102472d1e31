"""The decoder and the engine over fused kernels give what they give over torch's own. Without a GPU: interpreted."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from tests.fakes.tiny_model import VOCAB, tiny_engine, tiny_model
from tests.fakes.triton_interpreter import DEVICE
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.kv_cache import KVCache
from worker.load_causal_lm import ServedModel
from worker.request import ChoiceDelta, GenerateRequest
from worker.runner import EagerRunner
from worker.sampling import SamplingParams
from worker.step_kernels import TorchKernels, choose_kernels
from worker.triton_kernels import TritonKernels

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"model_type": "qwen2", "qkv_bias": True},
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "num_heads": 6},
    "all biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
}


def fused_engine(model: ServedModel) -> Engine:
    engine = tiny_engine(model, graphs="off", device=DEVICE.type)
    assert isinstance(engine.runner, EagerRunner)
    engine.runner.kernels = TritonKernels(engine.kv_cache, num_heads=model.model.shape.num_heads, max_rows=8)
    return engine


def answers(engine: Engine, lengths: tuple[int, ...], max_tokens: int) -> dict[str, list[int]]:
    for length in lengths:
        prompt = tuple((7 * i + length) % VOCAB for i in range(length))
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add(GenerateRequest(request_id=str(length), prompt_token_ids=prompt, sampling=sampling))
    found: dict[str, list[int]] = defaultdict(list)
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ChoiceDelta), event
            found[event.request_id] += event.token_ids
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_those_of_torch(family: str) -> None:
    model = tiny_model(device=DEVICE.type, **FAMILIES[family])
    lengths = (1, 4, 21)  # the last in two chunks
    torch_engine = tiny_engine(model, graphs="off", device=DEVICE.type, kernels="torch")
    assert answers(fused_engine(model), lengths, 4) == answers(torch_engine, lengths, 4)


def test_nan_in_every_free_block_reaches_no_answer() -> None:
    model = tiny_model(device=DEVICE.type)
    engine = fused_engine(model)
    engine.kv_cache.storage.fill_(torch.nan)
    torch_engine = tiny_engine(model, graphs="off", device=DEVICE.type, kernels="torch")
    assert answers(engine, (3, 5), 4) == answers(torch_engine, (3, 5), 4)


def pool(device: str = "cpu") -> KVCache:
    return KVCache(
        num_layers=1,
        num_blocks=2,
        block_size=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=torch.device(device),
    )


def test_the_cpu_is_served_by_torch() -> None:
    assert isinstance(choose_kernels("auto", pool(), num_heads=4, max_rows=8), TorchKernels)


def test_triton_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="CUDA"):
        choose_kernels("triton", pool(), num_heads=4, max_rows=8)


def test_kernels_of_another_name_are_refused() -> None:
    with pytest.raises(ValueError, match="kernels is 'cutlass'"):
        WorkerConfig(kernels="cutlass")  # type: ignore[arg-type]
