from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tiny_model import tiny_engine, tiny_model
from worker.config import WorkerConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefix_cache", "maybe"),
        ("prefix_cache", 1),
        ("max_batch", True),
        ("max_batch", 2.5),
        ("max_batch", "8"),
        ("max_batch", 0),
        ("tiers", [1, 2, 3, 4]),
        ("tiers", (1, 2, 3, "4")),
        ("device", "tpu"),
        ("graphs", None),
        ("capture", "sometimes"),
        ("gpu_memory_fraction", 0),
        ("gpu_memory_fraction", "half"),
        ("model", 7),
        ("served_model_name", 7),
        ("served_model_name", "a\nb"),
        ("served_model_name", "x" * 257),
        ("prefill_chunk", 100),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_itself(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        WorkerConfig(**{name: value})
    assert repr(value) in str(caught.value) or str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefix_cache", False),
        ("max_batch", None),
        ("tiers", (8, 16, 32, 64)),
        ("cache_dir", Path("/tmp/models")),
        ("gpu_memory_fraction", 1),
        ("max_graph_bytes", 1 << 32),
    ],
)
def test_a_right_value_is_taken(name: str, value: Any) -> None:
    assert getattr(WorkerConfig(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"tiers": (1, 2, 3)}, "must be 4 ascending lengths"),
        ({"tiers": (4, 3, 2, 1)}, "must be 4 ascending lengths"),
        ({"tiers": (8, 16, 32, 64), "max_model_len": 128}, "must be max_model_len, 128"),
        ({"buckets": (2, 4)}, "must ascend from 1"),
        ({"buckets": (1, 4), "max_batch": 8}, "must be max_batch, 8"),
    ],
)
def test_shapes_that_no_model_could_have_are_refused_before_one_is_loaded(
    values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        WorkerConfig(**values)


@pytest.mark.parametrize(("given", "name"), [("", "/models/one"), ("one", "one")])
def test_a_model_is_called_as_it_is_asked_for_or_as_it_is_served(given: str, name: str) -> None:
    assert WorkerConfig(model="/models/one", served_model_name=given).name == name
    engine = tiny_engine(tiny_model(), served_model_name=given)
    assert engine.info.model == (given or "tiny")
