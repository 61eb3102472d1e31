"""What a GGUF file says about its model, as a `config.json`. Pure: no tensor library, no files.

Whatever in the metadata could change the model's output is either translated or refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from worker.errors import UnsupportedModel

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""GGUF names mistral models "llama": the two are one architecture."""

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
_SHAPES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_UNDERSTOOD = {
    *_SHAPES.values(),
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "vocab_size",
}


def config_from_gguf(
    metadata: Mapping[str, Any], tensor_names: Collection[str], rope_factors: Sequence[float] | None = None
) -> dict[str, Any]:
    """The `config.json` of a GGUF file.

    `metadata` is its key-value table, `tensor_names` its tensors' GGUF names, `rope_factors` the values of
    `rope_freqs.weight` where it has one. Raises UnsupportedModel naming what cannot be expressed.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(f"GGUF architecture {architecture!r}; supported are {', '.join(GGUF_ARCHITECTURES)}")
    options = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    _refuse_unknown(architecture, metadata)
    config: dict[str, Any] = {"architectures": [_CLASSES[architecture]], "model_type": architecture}
    for name, key in _SHAPES.items():
        config[name] = _required(options, key)
    config["rms_norm_eps"] = _shortest(config["rms_norm_eps"])
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = options.get("attention.head_count_kv", heads)
    config["head_dim"] = _head_dim(options, config["hidden_size"] // heads)
    config["vocab_size"] = len(_required(metadata, "tokenizer.ggml.tokens"))
    config["hidden_act"] = "silu"
    if architecture != "qwen2":  # whose biases are part of the architecture
        config["attention_bias"] = any(name.endswith("attn_q.bias") for name in tensor_names)
    config["tie_word_embeddings"] = "output.weight" not in tensor_names
    config["rope_parameters"] = _rope_parameters(options, config["head_dim"], rope_factors)
    if options.get("attention.sliding_window"):
        config["sliding_window"] = options["attention.sliding_window"]
    return config | special_tokens_from_gguf(metadata)


def special_tokens_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The ids that begin, end and pad sequences, under the names a `generation_config.json` uses."""
    ids: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if (token_id := metadata.get(f"tokenizer.ggml.{key}")) is not None:
            ids[name] = token_id
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    if unique:
        ids["eos_token_id"] = unique if len(unique) > 1 else unique[0]
    return ids


def _required(options: Mapping[str, Any], key: str) -> Any:
    if key not in options:
        raise UnsupportedModel(f"the GGUF file does not state {key}")
    return options[key]


def _shortest(value: float) -> float:
    """The decimal a float32 was written as: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _refuse_unknown(architecture: str, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        option = key.removeprefix(f"{architecture}.")
        if option == key:
            continue
        if option not in _UNDERSTOOD and value:
            raise UnsupportedModel(f"GGUF option {key} = {value!r} is not implemented")
        if isinstance(value, list):
            raise UnsupportedModel(f"GGUF option {key} differs by layer, which is not implemented")


def _head_dim(options: Mapping[str, Any], default: int) -> int:
    head_dim = int(options.get("attention.key_length", options.get("rope.dimension_count", default)))
    for key in ("attention.value_length", "rope.dimension_count"):
        if options.get(key, head_dim) != head_dim:
            raise UnsupportedModel(f"GGUF option {key} = {options[key]} differs from the head size, {head_dim}")
    return head_dim


def _rope_parameters(options: Mapping[str, Any], head_dim: int, rope_factors: Sequence[float] | None) -> dict[str, Any]:
    theta = _shortest(options.get("rope.freq_base", 10_000.0))
    kind = options.get("rope.scaling.type", "none")
    if rope_factors is not None:
        return {"rope_theta": theta, **_llama3_parameters(theta, head_dim, rope_factors)}
    if kind == "linear":
        return {"rope_theta": theta, "rope_type": "linear", "factor": _required(options, "rope.scaling.factor")}
    if kind == "yarn":
        return {
            "rope_theta": theta,
            "rope_type": "yarn",
            "factor": _required(options, "rope.scaling.factor"),
            "original_max_position_embeddings": _required(options, "rope.scaling.original_context_length"),
        }
    if kind != "none":
        raise UnsupportedModel(f"GGUF option rope.scaling.type = {kind!r} is not implemented")
    return {"rope_theta": theta, "rope_type": "default"}


def _llama3_parameters(theta: float, head_dim: int, rope_factors: Sequence[float]) -> dict[str, Any]:
    """Llama 3 scaling, recovered from the divisors a GGUF file stores in its place."""
    factor = max(rope_factors)
    expected = [_llama3_divisor(theta ** (-2 * i / head_dim), factor) for i in range(head_dim // 2)]
    if len(rope_factors) != len(expected) or not all(
        math.isclose(found, wanted, rel_tol=1e-4) for found, wanted in zip(rope_factors, expected, strict=True)
    ):
        raise UnsupportedModel("the GGUF file's rope_freqs.weight is not Llama 3's scaling")
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_divisor(frequency: float, factor: float) -> float:
    rotations = _LLAMA3_CONTEXT * frequency / (2 * math.pi)
    smooth = (rotations - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    if smooth >= 1:
        return 1.0
    return factor if smooth <= 0 else 1 / ((1 - smooth) / factor + smooth)
