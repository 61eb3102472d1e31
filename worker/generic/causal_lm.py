"""A transformers model, unmodified, as a CausalLM."""

from __future__ import annotations

from typing import Any

import torch

from worker.attention.prefill import PagedPrefillAttention, PrefillSegment
from worker.causal_lm import ModelShape, StepAttention
from worker.errors import UnsupportedModel
from worker.generic.attention import IMPLEMENTATION, attending
from worker.kv_cache import KVCache

_VALUE_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Their tables depend on the longest position of a step, which a captured graph cannot look at."""
_EXPERT_OPTIONS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class TransformersCausalLM:
    """Runs a flat run of tokens as one batch row; positions and the attention of the step keep sequences apart."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.module: torch.nn.Module = model
        config = model.config.get_text_config(decoder=True)
        refuse_what_is_not_served(config)
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        self.shape = ModelShape(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
        )
        model.set_attn_implementation(IMPLEMENTATION)
        self._probe()

    def compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: StepAttention, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """See CausalLM."""
        with attending(attend):
            logits: torch.Tensor = self.model(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=0 if rows is None else rows,
            ).logits
        return logits.squeeze(0)

    @torch.inference_mode()
    def _probe(self) -> None:
        """Run two tokens once: whatever the attention of this model needs and we lack is refused now, by name."""
        weight = next(self.model.parameters())
        shape = self.shape
        cache = KVCache(
            num_layers=shape.num_layers,
            num_blocks=2,
            block_size=2,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )
        tokens = torch.arange(2, device=weight.device)
        table = torch.ones(1, dtype=torch.int32, device=weight.device)
        attend = _Counting(PagedPrefillAttention(cache, slots=tokens + 2, segments=[PrefillSegment(0, 0, 2, table)]))
        logits = self.compute(tokens, tokens, attend, None)
        if attend.layers != set(range(shape.num_layers)):
            raise UnsupportedModel(
                f"{type(self.model).__name__} ran {len(attend.layers)} of {shape.num_layers} layers through the attention interface"
            )
        if logits.shape != (2, shape.vocab_size):
            raise UnsupportedModel(f"{type(self.model).__name__} gave logits of shape {tuple(logits.shape)}")


def refuse_what_is_not_served(config: Any) -> None:
    """Raises UnsupportedModel for options under which a captured step would differ from an eager one."""
    for name in _EXPERT_OPTIONS:
        if (getattr(config, name, None) or 0) > 1:
            raise UnsupportedModel(f"{config.model_type}: {name}: mixture-of-experts layers are not served")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        kind = parameters.get("rope_type")
        if kind in _VALUE_DEPENDENT_ROPE:
            raise UnsupportedModel(f"{config.model_type}: rope_type {kind!r} depends on the values of positions")


class _Counting:
    """Notes which layers asked for attention."""

    def __init__(self, attend: StepAttention) -> None:
        self.attend = attend
        self.layers: set[int] = set()

    def __call__(self, layer: int, *qkv: torch.Tensor, **scoring: Any) -> torch.Tensor:
        """See StepAttention."""
        self.layers.add(layer)
        return self.attend(layer, *qkv, **scoring)
