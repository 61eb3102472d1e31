"""A real decoder with a static cache, captured whole: the recipe of hand-made CUDA graphs, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config
from transformers.cache_utils import StaticCache

from worker.graphs.bisect import find_failing_layer
from worker.graphs.errors import StaleState
from worker.graphs.fake_backend import FakeCapture
from worker.graphs.module_runner import CUDAGraphRunner
from worker.graphs.partial import PartialGraphs
from worker.graphs.pool import GraphPool

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
}


def causal_model(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


class DecodeStep(torch.nn.Module):
    """One token against a static cache."""

    def __init__(self, model: Any, cache: StaticCache) -> None:
        super().__init__()
        self.model = model
        self.cache = cache

    def forward(self, token: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.model(
            input_ids=token, position_ids=position, attention_mask=mask, past_key_values=self.cache, use_cache=True
        ).logits
        return logits[:, -1]


CACHE_LENGTH, PROMPT = 32, torch.tensor([[5, 17, 80, 3, 44]])


def step_inputs(token: Tensor, position: int) -> dict[str, Tensor]:
    mask = (torch.arange(CACHE_LENGTH) <= position).view(1, 1, 1, CACHE_LENGTH)
    return {"token": token.view(1, 1), "position": torch.tensor([[position]]), "mask": mask}


def prefilled(model: Any) -> tuple[StaticCache, Tensor]:
    """A static cache that holds the prompt, and the first token after it."""
    cache = StaticCache(model.config, max_cache_len=CACHE_LENGTH)
    with torch.no_grad():
        logits = model(PROMPT, past_key_values=cache, use_cache=True).logits
    return cache, logits[0, -1].argmax()


def rewind(cache: StaticCache) -> None:
    for layer in cache.layers:
        layer.cumulative_length.fill_(PROMPT.shape[1])


def graph_tokens(model: Any, count: int) -> list[int]:
    """Greedy decoding: prefill eagerly, then one graph replay a token."""
    cache, token = prefilled(model)
    step, runner = DecodeStep(model, cache), CUDAGraphRunner()
    first = step_inputs(token, PROMPT.shape[1])
    runner.warmup(step, first, reset=lambda: rewind(cache))
    runner.capture(step, first)
    tokens = [int(token)]
    for position in range(PROMPT.shape[1], PROMPT.shape[1] + count - 1):
        token = runner.replay(**step_inputs(token, position)).clone()[0].argmax()
        tokens.append(int(token))
    return tokens


def eager_tokens(model: Any, count: int) -> list[int]:
    """Greedy decoding without any cache."""
    ids = PROMPT
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, PROMPT.shape[1] :].tolist()


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SMALL), Qwen2Config(**SMALL), Qwen3Config(**SMALL, head_dim=8)], ids=lambda c: c.model_type
)
def test_a_static_cache_decode_step_replays_to_the_same_tokens(config: Any) -> None:
    model = causal_model(config)
    assert graph_tokens(model, 12) == eager_tokens(model, 12)


def test_a_cache_that_is_not_rewound_after_warm_up_is_found() -> None:
    model = causal_model(LlamaConfig(**SMALL))
    cache, token = prefilled(model)
    with pytest.raises(StaleState, match=r"cache_utils\.py"):
        CUDAGraphRunner().warmup(DecodeStep(model, cache), step_inputs(token, PROMPT.shape[1]))


def test_the_layer_of_a_mixture_of_experts_that_stops_the_capture_is_found() -> None:
    config = MixtralConfig(**SMALL, num_local_experts=4, experts_implementation="eager")
    found = find_failing_layer(causal_model(config), kwargs={"input_ids": PROMPT, "use_cache": False})
    assert found is not None
    assert found.path.startswith("model.layers.0.mlp")
    assert "modeling_mixtral.py" in found.error.where


def test_attention_alone_can_be_captured_where_the_experts_cannot() -> None:
    config = MixtralConfig(**SMALL, num_local_experts=4, experts_implementation="eager")
    model, plain = causal_model(config), causal_model(config)
    graphs = PartialGraphs(model, lambda name, _: name.endswith("self_attn"), pool=GraphPool(FakeCapture()))
    graphs.capture(kwargs={"input_ids": PROMPT, "use_cache": False})
    other = PROMPT.flip(1)
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids=other, use_cache=False).logits, plain(input_ids=other, use_cache=False).logits
        )
    assert graphs.graph_calls == dict.fromkeys(graphs.names, 1)
    assert len(graphs.names) == 2
