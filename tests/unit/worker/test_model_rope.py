from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import config_dict
from worker.errors import UnsupportedModel
from worker.model.architecture import DecoderConfig
from worker.model.rope import RopeConfig
from worker.model.rope_table import rope_table

POSITIONS = [0, 1, 1_000, 8_192, 20_000]
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 500_000.0},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "rope_theta": 1_000_000.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "attention_factor": 0.7},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
]


def reference(config: dict[str, Any]) -> torch.Tensor:
    """[positions, head_dim]: cosines, then sines, as transformers computes them."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    options = {name: value for name, value in config.items() if name != "model_type"}
    embedding = LlamaRotaryEmbedding(LlamaConfig(**options))
    cos, sin = embedding(torch.zeros(1), torch.tensor([POSITIONS]))
    half = config["head_dim"] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: "-".join(map(str, scaling.values())))
def test_the_table_equals_that_of_transformers_at_near_and_far_positions(scaling: dict[str, Any]) -> None:
    given = config_dict("llama", head_dim=64, max_position_embeddings=32_768, rope_parameters=scaling)

    table = rope_table(DecoderConfig.from_dict(given))

    torch.testing.assert_close(table[POSITIONS], reference(given), atol=1e-6, rtol=0)


def test_both_spellings_of_a_scaling_mean_the_same() -> None:
    old = {"max_position_embeddings": 131_072, "rope_theta": 500_000.0, "rope_scaling": {"type": "llama3", **LLAMA3}}
    new = {
        "max_position_embeddings": 131_072,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3},
    }

    assert RopeConfig.from_dict(old) == RopeConfig.from_dict(new)
    assert RopeConfig.from_dict(old).kind == "llama3"


def test_a_changed_scaling_changes_the_table() -> None:
    tables = [
        rope_table(DecoderConfig.from_dict(config_dict("llama", head_dim=64, rope_parameters=scaling)))
        for scaling in SCALINGS
    ]

    assert all(not torch.equal(tables[i], tables[j]) for i in range(len(tables)) for j in range(i))


def test_the_context_of_a_scaling_defaults_to_the_models_own() -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != "original_max_position_embeddings"}

    rope = RopeConfig.from_dict(
        {"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "llama3", **scaling}}
    )

    assert rope.original_max_position_embeddings == 4096


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "longrope"),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, "mrope"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "twist": 3}, "twist"),
        ({"rope_type": "default", "factor": 2.0}, "factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_a_scaling_that_is_not_implemented_is_refused_by_name(scaling: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        RopeConfig.from_dict({"max_position_embeddings": 512, "rope_scaling": scaling})
