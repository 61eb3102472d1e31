from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import config_dict, write_config
from worker.build import build_engine
from worker.config import WorkerConfig
from worker.config_numbers import LIMITS, check_config_numbers
from worker.errors import ModelLoadError
from worker.memory_errors import memory_named


class DeafSink:
    """Nothing runs here, so nothing is said."""

    def __call__(self, events: Any) -> None:
        raise AssertionError("an engine that was refused has said something")


@pytest.mark.parametrize("value", [0, -1, 2**60, 64.5, "64", True, float("nan"), {}])
@pytest.mark.parametrize("name", LIMITS)
def test_a_number_that_no_model_has_is_refused_by_name_before_memory_is_set_aside(
    tmp_path: Path, name: str, value: Any
) -> None:
    folder = write_config(tmp_path, config_dict("llama", **{name: value}))
    config = WorkerConfig(model=str(folder), load_format="dummy", device="cpu", cpu_threads=1)
    with pytest.raises(ModelLoadError, match=rf"{name} is .*, must be a whole number in \[1, {LIMITS[name]}\]"):
        build_engine(config, DeafSink())


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "1e-5", True, []])
@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
def test_a_rate_that_no_model_has_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"{name} is .*, must be a number over"):
        check_config_numbers(config_dict("llama", **{name: value}))


@pytest.mark.parametrize("value", [5, "LlamaForCausalLM", [7], {}])
def test_architectures_that_are_no_list_of_names_are_refused(value: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"architectures is .*, must be a list of names"):
        check_config_numbers(config_dict("llama", architectures=value))


def test_heads_that_cannot_share_keys_evenly_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="num_attention_heads is 4, must be a multiple of num_key_value_heads, 3"):
        check_config_numbers(config_dict("llama", num_key_value_heads=3))


def test_what_is_absent_null_or_said_of_each_layer_is_left_to_the_model() -> None:
    check_config_numbers({"head_dim": None, "num_key_value_heads": None, "intermediate_size": [64, 128]})
    check_config_numbers(config_dict("qwen3", architectures=["Qwen3ForCausalLM"]))


@pytest.mark.parametrize("name", ["max_batch", "block_size", "prefill_chunk", "cpu_threads"])
def test_a_setting_beyond_any_use_is_refused_with_its_limit(name: str) -> None:
    setting: dict[str, Any] = {name: 10**20}
    with pytest.raises(ValueError, match=rf"{name} is {10**20}, must be at most \d+"):
        WorkerConfig(**setting)


def test_a_lack_of_memory_names_what_takes_it() -> None:
    with pytest.raises(ModelLoadError, match=r"tiny does not fit the memory: lower max_batch"), memory_named("tiny"):
        torch.zeros(1 << 50)
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory")):
        with pytest.raises(ModelLoadError, match="does not fit"), memory_named("tiny"):
            raise error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="something else"), memory_named("tiny"):
        raise RuntimeError("something else")
