"""What is given up first when there is too much work: said by the client in metadata, carried to the engine."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar

from protos import replica_pb2
from worker.errors import InvalidRequest
from worker.request import Criticality

KEY = "graphpool-criticality"
DEFAULT = Criticality.CRITICAL
NAMES = {one.name.lower().replace("_", "-"): one for one in Criticality}

_current: ContextVar[Criticality] = ContextVar("criticality", default=DEFAULT)


def current_criticality() -> Criticality:
    """Of the call this code is running for."""
    return _current.get()


def use_criticality(criticality: Criticality) -> None:
    """From now on in this task."""
    _current.set(criticality)


def criticality_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> Criticality:
    """What a call's metadata says, CRITICAL if nothing. Raises InvalidRequest for anything but one of the four names."""
    values = [value for key, value in metadata or () if key == KEY]
    if not values:
        return DEFAULT
    criticality = NAMES.get(str(values[-1]))
    if criticality is None:
        raise InvalidRequest(KEY, f"must be one of {', '.join(NAMES)}")
    return criticality


def criticality_to_proto(criticality: Criticality) -> replica_pb2.Criticality.ValueType:
    """The wire's number."""
    return replica_pb2.Criticality.Value(f"CRITICALITY_{criticality.name}")


def criticality_from_proto(number: replica_pb2.Criticality.ValueType) -> Criticality:
    """Absent or unknown = CRITICAL: a newer router may know more classes."""
    return Criticality(number) if number in replica_pb2.Criticality.values() and number else DEFAULT
