"""Tiny checkpoints written by transformers, one for each family the decoder knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SHAPES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def config_dict(model_type: str, **changes: Any) -> dict[str, Any]:
    """A `config.json` of a tiny model."""
    config = {"model_type": model_type, **SHAPES, **changes}
    if model_type == "mistral":
        config.setdefault("sliding_window", None)
    return config


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_checkpoint(directory: Path, model_type: str, *, seed: int = 0, **changes: Any) -> Any:
    """Save a random model of this family and config; return it (a transformers model in evaluation mode)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**config_dict(model_type, **changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases too: left at one and zero they could be dropped without anyone noticing.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return model


def edit_weights(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Add, replace or (None) drop tensors of a checkpoint; dots in names are written as double underscores."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    for name, tensor in tensors.items():
        key = name.replace("__", ".")
        if tensor is None:
            del weights[key]
        else:
            weights[key] = tensor
    save_file(weights, path, metadata={"format": "pt"})
