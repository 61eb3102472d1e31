"""Turn one GGUF file into a directory of safetensors, config and tokenizer: `python -m worker.model.gguf_convert`.

Runs as a child process, so that the memory and the imports of a conversion never stay with whoever asked for it.
Tensors are read, dequantised and written one by one; every value is kept exactly, in the smallest of bfloat16, float16
and float32 that holds the whole tensor.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

from worker.errors import UnsupportedModel
from worker.model.gguf_config import config_from_gguf, special_tokens_from_gguf
from worker.model.gguf_tokenizer import check_tokenizer, write_tokenizer
from worker.model.progress import Progress

SHARD_BYTES = 2 << 30
"""Tensors are gathered up to this size before a file is written: the memory a conversion needs."""

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_PERMUTED = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")


def tensor_name(gguf_name: str) -> str:
    """The checkpoint's name for a GGUF tensor. Raises UnsupportedModel for one that has no place in a decoder."""
    if gguf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[gguf_name]
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name)
    if layer is None or layer[2] not in _LAYER_NAMES:
        raise UnsupportedModel(f"GGUF tensor {gguf_name} is not part of a supported decoder")
    return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"


def convert(source: Path, directory: Path, progress: Progress) -> None:
    """Write `source` into the existing, empty `directory`. Raises UnsupportedModel for what cannot be converted."""
    reader = GGUFReader(source)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = tensors.pop(_ROPE_FACTORS, None)
    config = config_from_gguf(metadata, tensors, None if factors is None else _values(factors).tolist())
    check_tokenizer(metadata)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", special_tokens_from_gguf(metadata))
    _write_shards(directory, _weights(tensors, config, progress))
    progress("converting the tokenizer", 0, 1)
    write_tokenizer(source, metadata, directory)
    progress("converting the tokenizer", 1, 1)


def _weights(
    tensors: Mapping[str, Any], config: Mapping[str, Any], progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    total = sum(int(tensor.n_bytes) for tensor in tensors.values())
    done = 0
    for gguf_name, tensor in tensors.items():
        name = tensor_name(gguf_name)
        values = _values(tensor)
        if config["model_type"] == "llama" and name.endswith(_PERMUTED):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = _split_rotary_halves(values, heads)
        yield name, _smallest_exact(torch.from_numpy(np.array(values)))
        done += int(tensor.n_bytes)
        progress("converting the weights", done, total)


def _values(tensor: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def _split_rotary_halves(
    values: np.ndarray[Any, np.dtype[np.float32]], heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows from GGUF's order for llama, rotary pairs side by side, to first halves before second halves."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _smallest_exact(tensor: torch.Tensor) -> torch.Tensor:
    for dtype in (torch.bfloat16, torch.float16):
        narrow = tensor.to(dtype)
        if torch.equal(narrow.float(), tensor):
            return narrow
    return tensor


def _write_shards(directory: Path, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """One `model.safetensors`, or shards with an index when it would be larger than SHARD_BYTES."""
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = 0

    def flush() -> None:
        shards.append(sorted(held))
        save_file(held, directory / f"shard-{len(shards)}", metadata={"format": "pt"})
        held.clear()

    for name, tensor in weights:
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        held[name] = tensor
        total += tensor.nbytes
    flush()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        single = len(shards) == 1
        file = "model.safetensors" if single else f"model-{number:05}-of-{len(shards):05}.safetensors"
        (directory / f"shard-{number}").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        _write_json(
            directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _report(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Convert argv[1] into the directory argv[2]; progress and the error, if any, are JSON lines on stdout."""
    source, directory = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        convert(source, directory, lambda what, done, total: _report(what=what, done=done, total=total))
    except UnsupportedModel as error:
        _report(error="unsupported", message=str(error))
        return 1
    except Exception as error:  # noqa: BLE001 - this process has one task, and its parent shows what became of it
        _report(error="failed", message=f"{source.name} could not be converted: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
