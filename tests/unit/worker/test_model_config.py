from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.checkpoints import config_dict
from worker.errors import UnsupportedModel
from worker.model.architecture import DecoderConfig


def test_shapes_are_read_from_the_config() -> None:
    config = DecoderConfig.from_dict(config_dict("llama"))

    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (32, 2, 4, 2)
    assert (config.head_dim, config.vocab_size, config.max_position_embeddings) == (16, 97, 512)
    assert config.rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("llama", {}, {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False}),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ("llama", {"head_dim": None}, {"head_dim": 8}),
        ("mistral", {}, {"qkv_bias": False, "o_bias": False}),
        ("qwen2", {}, {"qkv_bias": True, "o_bias": False}),
        ("qwen3", {}, {"qkv_bias": False, "qk_norm": True}),
        ("qwen3", {"head_dim": None}, {"head_dim": 128}),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, {}),
        ("mistral", {"sliding_window": 512}, {}),
        ("llama", {"layer_types": ["full_attention", "full_attention"]}, {}),
        ("llama", {"made_up": False, "also_made_up": None, "_name_or_path": "x", "unsloth_version": "1"}, {}),
        ("llama", {"hidden_act": "swish"}, {}),
    ],
)
def test_each_family_means_what_transformers_means(
    model_type: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = DecoderConfig.from_dict(config_dict(model_type, **changes))

    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("gpt2", {}, "gpt2.*llama, mistral, qwen2, qwen3"),
        ("mixtral", {}, "mixtral"),
        ("mistral", {"sliding_window": 64}, "sliding_window = 64"),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, "sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"logits_scaling": 8.0}, "logits_scaling"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("llama", {"num_experts": 8}, "num_experts"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"attention_bias": True}, "attention_bias"),
        ("llama", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"hidden_size": None}, "hidden_size"),
        ("qwen2", {"num_key_value_heads": None}, "num_key_value_heads"),
        ("llama", {"num_key_value_heads": 3}, "num_kv_heads 3"),
        ("llama", {"head_dim": 15}, "head_dim 15"),
        ("llama", {"vocab_size": 0}, "vocab_size"),
        ("llama", {"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_what_would_change_the_output_is_refused_by_name(model_type: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        DecoderConfig.from_dict(config_dict(model_type, **changes))


def test_published_configs_are_accepted() -> None:
    smollm = {
        **config_dict("llama", rope_theta=100000, tie_word_embeddings=True),
        "architectures": ["LlamaForCausalLM"],
        "attention_dropout": 0.0,
        "initializer_range": 0.041666666666666664,
        "is_llama_config": True,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "transformers_version": "4.42.3",
        "use_cache": True,
    }
    qwen = {
        **config_dict("qwen2", rope_theta=1000000.0),
        "max_window_layers": 21,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "use_mrope": False,
    }

    assert DecoderConfig.from_dict(smollm).rope.theta == 100_000
    assert DecoderConfig.from_dict(qwen).rope.theta == 1_000_000
