"""The public shapes that are measured with random weights, as `config.json` contents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": 2}

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _COMMON
    | {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "llama-3.2-1b": _COMMON
    | {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
    "qwen2.5-1.5b": _COMMON
    | {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "llama-2-7b": _COMMON
    | {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    },
    "qwen3-8b": _COMMON
    | {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
    },
}

TINY = "tiny"
TINY_SHAPE: dict[str, Any] = SHAPES["smollm2-135m"] | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 499,
    "max_position_embeddings": 256,
}
"""No public shape: for trying a benchmark on the CPU."""


def write_config(name: str, folder: Path) -> Path:
    """`folder/name/config.json`, for `load_format="dummy"`."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    path = target / "config.json"
    path.write_text(json.dumps(TINY_SHAPE if name == TINY else SHAPES[name]))
    return path
