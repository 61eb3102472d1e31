"""The recipe of hand-made CUDA graphs on a transformers model: eager prefill, static cache, one replay a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
from transformers.cache_utils import StaticCache

from worker.graphs.errors import StaleState
from worker.graphs.module_runner import CUDAGraphRunner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTH = 64
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
    "attn_implementation": "sdpa",
}


class DecodeStep(torch.nn.Module):
    def __init__(self, model: Any, cache: StaticCache) -> None:
        super().__init__()
        self.model = model
        self.cache = cache

    def forward(self, token: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.model(
            input_ids=token, position_ids=position, attention_mask=mask, past_key_values=self.cache, use_cache=True
        ).logits
        return logits[:, -1]


def step_inputs(token: Tensor, position: int) -> dict[str, Tensor]:
    mask = (torch.arange(LENGTH, device="cuda") <= position).view(1, 1, 1, LENGTH).expand(len(token), -1, -1, -1)
    positions = torch.full((len(token), 1), position, device="cuda")
    return {"token": token.view(-1, 1), "position": positions, "mask": mask.contiguous()}


def prefilled(model: Any, prompt: Tensor) -> tuple[StaticCache, Tensor]:
    cache = StaticCache(model.config, max_cache_len=LENGTH)
    with torch.no_grad():
        logits = model(prompt, past_key_values=cache, use_cache=True).logits
    return cache, logits[:, -1].argmax(-1)


def rewind(cache: StaticCache, length: int) -> None:
    for layer in cache.layers:
        layer.cumulative_length.fill_(length)


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).cuda().eval()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("config", [LlamaConfig(**SHAPE), Qwen2Config(**SHAPE)], ids=lambda config: config.model_type)
def test_forty_replayed_tokens_equal_forty_eager_ones(config: Any, batch: int) -> None:
    model = model_of(config)
    prompt = torch.randint(512, (batch, 9), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    cache, token = prefilled(model, prompt)
    step, runner = DecodeStep(model, cache), CUDAGraphRunner()
    runner.warmup(step, step_inputs(token, 9), reset=lambda: rewind(cache, 9))
    runner.capture(step, step_inputs(token, 9))

    ids = torch.cat([prompt, token.view(-1, 1)], dim=1)
    for position in range(9, 49):
        logits = runner.replay(**step_inputs(ids[:, -1], position)).clone()
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits[:, -1]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)


def test_a_cache_that_warm_up_would_dirty_is_found() -> None:
    model = model_of(LlamaConfig(**SHAPE))
    cache, token = prefilled(model, torch.tensor([[1, 2, 3]], device="cuda"))
    with pytest.raises(StaleState, match=r"cache_utils\.py"):
        CUDAGraphRunner().warmup(DecodeStep(model, cache), step_inputs(token, 3))
