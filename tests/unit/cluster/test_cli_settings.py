from __future__ import annotations

from pathlib import Path

import pytest

from cluster.cli.worker_options import parse_settings
from worker.config import WorkerConfig


def test_values_are_read_by_their_form() -> None:
    found = parse_settings(["capture=startup", "prefix_cache=false", "max_graph_bytes=4096", "buckets=[1, 2, 4]"])
    assert found == {"capture": "startup", "prefix_cache": False, "max_graph_bytes": 4096, "buckets": (1, 2, 4)}


@pytest.mark.parametrize("setting", ["capture", "no_such_field=1", "=1"])
def test_what_is_no_field_is_refused_with_the_fields_there_are(setting: str) -> None:
    with pytest.raises(ValueError, match="--set"):
        parse_settings([setting])


@pytest.mark.parametrize(
    "setting",
    [
        "tiers=[1,",
        "tiers={",
        "capture='",
        "buckets=@",
        "seed=!!python/object:x",
        "seed=2001-99-99",
        "tiers=" + "[" * 5000,
    ],
)
def test_a_value_that_is_no_yaml_is_refused_with_its_setting(setting: str) -> None:
    with pytest.raises(ValueError, match="cannot be read as YAML") as caught:
        parse_settings([setting])
    assert setting in str(caught.value)


def test_a_folder_is_a_path() -> None:
    assert WorkerConfig(**parse_settings(["cache_dir=/models"])).cache_dir == Path("/models")
