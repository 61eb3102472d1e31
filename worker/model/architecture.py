"""What a `config.json` says about a decoder, checked: whatever would change the output is implemented or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.errors import UnsupportedModel
from worker.model.rope import RopeConfig

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

_SHAPES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
_READ = {
    *_SHAPES.values(),
    *("model_type", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "tie_word_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
}
_WITHOUT_EFFECT = {
    # About the file, the tokenizer or the generation loop.
    *("architectures", "dtype", "torch_dtype", "transformers_version", "transformers.js_config", "tokenizer_class"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
    *("use_cache", "return_dict", "torchscript", "name_or_path", "model_max_length", "is_local", "is_llama_config"),
    # About training, or about heads that a language model does not have.
    *("initializer_range", "attention_dropout", "pretraining_tp", "id2label", "label2id", "problem_type"),
    *("finetuning_task", "task_specific_params", "num_labels"),
}
_PREFIXES_WITHOUT_EFFECT = ("_", "unsloth")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shapes and options of one decoder."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    """The longest sequence, in tokens."""
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    """The output projection is the embedding matrix."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised, head by head, before they are turned."""

    def __post_init__(self) -> None:
        for name in (*_SHAPES, "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}, must be a positive whole number")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd and cannot be turned in pairs")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """From a `config.json`. Raises UnsupportedModel naming the option that is missing or not implemented."""
        config = {name: value for name, value in config.items() if value is not None}
        model_type = config.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise UnsupportedModel(
                f"model type {model_type!r} is not implemented; supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        options = _family_options(model_type, config)
        _refuse_unknown(config, {"attention_bias", "mlp_bias"} if model_type == "llama" else {"attention_bias"})
        _refuse_sliding_window(config)
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise UnsupportedModel(f"hidden_act = {config['hidden_act']!r} is not implemented; supported is silu")
        shapes = {name: _required(config, key) for name, key in _SHAPES.items()}
        try:
            return cls(
                model_type=model_type,
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope=RopeConfig.from_dict(config),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                **shapes,
                **options,
            )
        except (ValueError, TypeError) as error:
            raise UnsupportedModel(f"the config cannot be served: {error}") from error

    @property
    def qkv_heads(self) -> int:
        """Heads in the fused projection: queries, then keys, then values."""
        return self.num_heads + 2 * self.num_kv_heads


def _family_options(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What each family means when its config says nothing, and what is part of its architecture."""
    heads = _required(config, "num_attention_heads")
    default_head_dim = 128 if model_type == "qwen3" else _required(config, "hidden_size") // heads
    bias = bool(config.get("attention_bias", False))
    if bias and model_type in ("mistral", "qwen2"):
        raise UnsupportedModel(f"attention_bias = {config['attention_bias']!r} is not an option of {model_type}")
    return {
        "num_kv_heads": config.get("num_key_value_heads", heads)
        if model_type == "llama"
        else _required(config, "num_key_value_heads"),
        "head_dim": config.get("head_dim", default_head_dim),
        "qkv_bias": bias or model_type == "qwen2",
        "o_bias": bias,
        "mlp_bias": model_type == "llama" and bool(config.get("mlp_bias", False)),
        "qk_norm": model_type == "qwen3",
    }


def _required(config: Mapping[str, Any], name: str) -> Any:
    if name not in config:
        raise UnsupportedModel(f"the config does not state {name}")
    return config[name]


def _refuse_unknown(config: Mapping[str, Any], options: set[str]) -> None:
    for name, value in config.items():
        known = name in _READ or name in _WITHOUT_EFFECT or name in options
        # An option that is off cannot change anything.
        if value and not known and not name.startswith(_PREFIXES_WITHOUT_EFFECT):
            shown = repr(value) if len(repr(value)) <= 100 else "..."
            raise UnsupportedModel(f"config option {name} = {shown} is not implemented")


def _refuse_sliding_window(config: Mapping[str, Any]) -> None:
    if any(kind != "full_attention" for kind in config.get("layer_types", ())):
        raise UnsupportedModel(f"layer_types = {sorted(set(config['layer_types']))} is not implemented")
    window = config.get("sliding_window")
    if config["model_type"] in ("qwen2", "qwen3"):
        # Their window is off unless this says otherwise; from which layer it holds does not matter here.
        window = window if config.get("use_sliding_window") else None
    if window is not None and window < _required(config, "max_position_embeddings"):
        raise UnsupportedModel(f"sliding_window = {window} is not implemented")
