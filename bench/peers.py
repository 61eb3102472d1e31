"""The peers on the same GPU: transformers eagerly, and its StaticCache with a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch

from bench.clocks import host_ms
from bench.shapes import SHAPES


def hf_model(name: str, device: str = "cuda") -> Any:
    """Random bf16 weights of a public shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**SHAPES[name])
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


@torch.no_grad()
def hf_prefill_ms(model: Any, length: int) -> float:
    """First token of a prompt, eagerly."""
    ids = torch.randint(0, model.config.vocab_size, (1, length), device=model.device)
    return host_ms(
        lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1), rounds=10, warm=5
    )


@torch.no_grad()
def hf_eager_step_ms(model: Any, batch: int, context: int = 128) -> float:
    """One decode step over a growing DynamicCache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(
        input_ids=torch.randint(0, model.config.vocab_size, (batch, context), device=model.device),
        **_cache(model, cache),
    )
    token = torch.randint(0, model.config.vocab_size, (batch, 1), device=model.device)
    return host_ms(lambda: model(input_ids=token, **_cache(model, cache)).logits[:, -1].argmax(-1), rounds=20, warm=5)


@torch.no_grad()
def hf_graph_step_ms(model: Any, batch: int, context: int = 128) -> float:
    """One decode step of StaticCache captured whole, replayed."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=512)
    token = torch.randint(0, model.config.vocab_size, (batch, 1), device=model.device)
    position = torch.full((batch, 1), context, device=model.device)

    def step() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=token, position_ids=position, **_cache(model, cache)).logits
        return logits[:, -1].argmax(-1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    cache.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    cache.reset()
    took = host_ms(graph.replay, rounds=50, warm=5)
    graph.reset()
    return took


def _cache(model: Any, cache: Any) -> dict[str, Any]:
    """The cache argument under the name this transformers release gives it."""
    import inspect

    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    return {name: cache, "use_cache": True}
