"""How many sequences a pool can run at once."""

from __future__ import annotations

from collections.abc import Iterable

from protos import control_pb2


def num_rows(loads: Iterable[control_pb2.Load]) -> int:
    """Rows of all these replicas together; one that reports no rows has those in use and those of its freest tier."""
    return sum(load.max_rows or load.running + _free_slots(load) for load in loads)


def _free_slots(load: control_pb2.Load) -> int:
    return max((tier.free_slots for tier in load.tiers), default=0)
