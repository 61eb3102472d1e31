"""The bridge from transformers' attention interface to the attention of the current step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface

from worker.causal_lm import StepAttention
from worker.errors import UnsupportedModel

IMPLEMENTATION = "graphpool_paged"

_KNOWN_OPTIONS = frozenset(
    {"is_causal", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)
_step: ContextVar[StepAttention] = ContextVar("graphpool_step_attention")


@contextmanager
def attending(attend: StepAttention) -> Iterator[None]:
    """Every attention layer that runs inside uses `attend`."""
    token = _step.set(attend)
    try:
        yield
    finally:
        _step.reset(token)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim] -> [1, tokens, heads, head_dim].

    Raises UnsupportedModel naming any option of the model's attention that the paged pool does not implement.
    """
    refused = sorted(name for name, option in options.items() if option is not None and name not in _KNOWN_OPTIONS)
    if dropout:
        refused.append("dropout")
    if attention_mask is not None:
        refused.append("attention_mask")
    if key.shape[-1] != value.shape[-1]:
        refused.append("values of another width than keys")
    if refused:
        raise UnsupportedModel(
            f"{type(module).__name__} uses {', '.join(refused)}, which paged attention does not have"
        )
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    out = _step.get()(int(module.layer_idx), q, k, v, scale=scaling, sliding_window=sliding_window)  # type: ignore[arg-type]
    return out.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, paged_attention)
