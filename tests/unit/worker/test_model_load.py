from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import config_dict, write_config
from worker.errors import ModelLoadError
from worker.model.load import LoadedModel, eos_token_ids, generation_defaults, load_model
from worker.model.source import ModelFiles, resolve_model

CPU = torch.device("cpu")


def dummy(directory: Path, seed: int = 0, **changes: Any) -> LoadedModel:
    write_config(directory, config_dict("qwen2", hidden_size=256, **changes))
    files = resolve_model(str(directory), load_format="dummy")
    return load_model(files, dtype=torch.float32, device=CPU, load_format="dummy", seed=seed)


def files_with(config: dict[str, Any], generation_config: dict[str, Any]) -> ModelFiles:
    return ModelFiles(name="x", directory=Path("/x"), config=config, generation_config=generation_config)


def test_dummy_weights_are_spread_as_in_a_trained_model(tmp_path: Path) -> None:
    decoder = dummy(tmp_path).decoder

    for name, parameter in decoder.named_parameters():
        if name.endswith("norm"):
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.25), name


def test_dummy_weights_follow_their_seed(tmp_path: Path) -> None:
    first, same, other = (dummy(tmp_path, seed=seed).decoder.embedding for seed in (1, 1, 2))

    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        ({"eos_token_id": 5}, {}, (5,)),
        ({"eos_token_id": [5, 6]}, {}, (5, 6)),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 8, 7]}, (7, 8)),
        ({"eos_token_id": 5}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": 5}, {"eos_token_id": None}, (5,)),
        ({}, {}, ()),
    ],
)
def test_every_id_that_ends_an_answer_is_kept(
    config: dict[str, Any], generation_config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert eos_token_ids(files_with(config, generation_config)) == expected


@pytest.mark.parametrize("value", ["</s>", [1, "2"], True, 1.5])
def test_an_end_that_is_no_token_id_is_refused(value: object) -> None:
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        eos_token_ids(files_with({"eos_token_id": value}, {}))


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        ({}, {}),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
        ),
        ({"temperature": None, "max_length": 4096, "bos_token_id": 1}, {}),
        (
            {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
    ],
)
def test_the_authors_sampling_defaults_are_read(generation_config: dict[str, Any], expected: dict[str, float]) -> None:
    assert generation_defaults(generation_config) == expected


@pytest.mark.parametrize("generation_config", [{"top_p": 7.0}, {"temperature": "hot"}])
def test_defaults_no_request_could_use_are_refused(generation_config: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="generation_config"):
        generation_defaults(generation_config)
