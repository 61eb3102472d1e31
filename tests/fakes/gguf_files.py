"""GGUF files written from tiny checkpoints, the way llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MERGED = ["he", "ll", "12"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def vocabulary(size: int) -> tuple[list[str], list[int]]:
    """Control tokens, single bytes as byte-level vocabularies spell them, pairs of them; and GGUF's token types."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = (control + alphabet + MERGED)[:size]
    return tokens, [3 if token in control else 1 for token in tokens]


def write_gguf(path: Path, model: Any, **metadata: Any) -> Path:
    """Write a transformers model as an unquantised GGUF file; `metadata` adds or replaces keys (dots as `__`)."""
    config = model.config
    architecture = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    tokens, types = vocabulary(config.vocab_size)
    values: dict[str, Any] = {
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.value_length": config.head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{architecture}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(token) for token in MERGED],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
        **{key.replace("__", "."): value for key, value in metadata.items()},
    }
    for key, value in values.items():
        _add(writer, key, value)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            writer.add_tensor(*_tensor(name, tensor, config, permuted=architecture == "llama"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _tensor(name: str, tensor: torch.Tensor, config: Any, *, permuted: bool) -> tuple[str, np.ndarray[Any, Any]]:
    stem, kind = name.rsplit(".", 1)
    prefix = ""
    if stem.startswith("model.layers."):
        _, _, number, stem = stem.split(".", 3)
        prefix = f"blk.{number}."
    values = tensor.detach().numpy()
    if permuted and stem in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    return f"{prefix}{NAMES[stem]}.{kind}", np.ascontiguousarray(values)
