from __future__ import annotations

import asyncio

import pytest

from cluster.criticality import (
    KEY,
    criticality_from_proto,
    criticality_of,
    criticality_to_proto,
    current_criticality,
    use_criticality,
)
from protos import replica_pb2
from worker.errors import InvalidRequest
from worker.request import Criticality


@pytest.mark.parametrize(
    ("value", "criticality"),
    [
        ("sheddable", Criticality.SHEDDABLE),
        ("sheddable-plus", Criticality.SHEDDABLE_PLUS),
        ("critical", Criticality.CRITICAL),
        ("critical-plus", Criticality.CRITICAL_PLUS),
    ],
)
def test_metadata_names_one_of_four_classes(value: str, criticality: Criticality) -> None:
    assert criticality_of([("other", "x"), (KEY, value)]) is criticality
    assert criticality_from_proto(criticality_to_proto(criticality)) is criticality


@pytest.mark.parametrize("value", ["", "CRITICAL", "critical_plus", "3", "sheddable ", b"critical"])
def test_anything_else_is_refused_by_name(value: str | bytes) -> None:
    with pytest.raises(InvalidRequest, match="graphpool-criticality: must be one of sheddable, sheddable-plus"):
        criticality_of([(KEY, value)])


def test_a_call_that_says_nothing_is_critical() -> None:
    assert criticality_of(None) is criticality_of([]) is Criticality.CRITICAL
    assert criticality_from_proto(replica_pb2.CRITICALITY_UNSPECIFIED) is Criticality.CRITICAL


async def test_each_task_has_its_own() -> None:
    async def run(criticality: Criticality) -> Criticality:
        use_criticality(criticality)
        await asyncio.sleep(0)
        return current_criticality()

    assert await asyncio.gather(*map(run, Criticality)) == list(Criticality)
    assert current_criticality() is Criticality.CRITICAL
