"""The numbers of a model's config.json that memory is set aside by, held to what a model can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.errors import ModelLoadError

LIMITS = {
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 26,
}

RATES = {"rms_norm_eps": (0.0, 1.0), "rope_theta": (1.0, 1e12)}
"""Numbers that need not be whole: what they must be over, and at most. Not a number is never either."""


def check_config_numbers(config: Mapping[str, Any]) -> None:
    """Raise ModelLoadError naming the number that is none, or past its limit.

    What is absent or null has a default; a list says something of each layer, which the model's own code reads.
    """
    for name, limit in LIMITS.items():
        value = config.get(name)
        if value is None or isinstance(value, list):
            continue
        if type(value) is not int or not 1 <= value <= limit:
            raise ModelLoadError(f"config.json: {name} is {value!r:.40}, must be a whole number in [1, {limit}]")
    for name, (above, most) in RATES.items():
        value = config.get(name)
        if value is not None and not (_is_number(value) and above < value <= most):
            raise ModelLoadError(
                f"config.json: {name} is {value!r:.40}, must be a number over {above:g}, at most {most:g}"
            )
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise ModelLoadError(
            f"config.json: num_attention_heads is {heads}, must be a multiple of num_key_value_heads, {kv_heads}"
        )
    architectures = config.get("architectures")
    if architectures is not None and not _is_list_of_names(architectures):
        raise ModelLoadError(f"config.json: architectures is {architectures!r:.40}, must be a list of names")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
