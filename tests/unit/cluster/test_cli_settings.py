from __future__ import annotations

import pytest

from cluster.cli.worker_options import parse_settings


def test_values_are_read_by_their_form() -> None:
    found = parse_settings(["capture=startup", "prefix_cache=false", "max_graph_bytes=4096", "buckets=[1, 2, 4]"])
    assert found == {"capture": "startup", "prefix_cache": False, "max_graph_bytes": 4096, "buckets": (1, 2, 4)}


@pytest.mark.parametrize("setting", ["capture", "no_such_field=1", "=1"])
def test_what_is_no_field_is_refused_with_the_fields_there_are(setting: str) -> None:
    with pytest.raises(ValueError, match="--set"):
        parse_settings([setting])
