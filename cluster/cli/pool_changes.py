"""What `graphpool serve` tells of its replicas while they serve."""

from __future__ import annotations

from collections.abc import Sequence

from protos import control_pb2

READY, DRAINING = control_pb2.REPLICA_STATE_READY, control_pb2.REPLICA_STATE_DRAINING


class PoolChanges:
    """Compares what a router knows with what it knew."""

    def __init__(self, loads: Sequence[control_pb2.ReplicaLoad]) -> None:
        self._ready = _incarnations(loads)
        self._last = dict(self._ready)
        """Of each replica that was ever ready, its last incarnation that was."""

    def lines(self, loads: Sequence[control_pb2.ReplicaLoad], *, is_replaced: bool) -> list[str]:
        """A line in console markup for each replica that left or joined; `is_replaced`: Ray Serve makes up for losses."""
        now = _incarnations(loads)
        draining = {load.replica for load in loads if load.state == DRAINING}
        lines = [_left(name, name in draining, is_replaced) for name in sorted(self._ready.keys() - now.keys())]
        for name, incarnation in sorted(now.items()):
            if self._ready.get(name) != incarnation:
                lines.append(self._joined(name, incarnation))
        self._ready = now
        self._last |= now
        return lines

    def _joined(self, name: str, incarnation: str) -> str:
        if name not in self._last:
            return f"[green]{name} is ready[/]"
        if self._last[name] == incarnation:
            return f"[green]{name} answers again[/], the same process"
        return f"[green]{name} is ready[/] in a new process"


def _incarnations(loads: Sequence[control_pb2.ReplicaLoad]) -> dict[str, str]:
    return {load.replica: load.incarnation for load in loads if load.state == READY}


def _left(name: str, is_draining: bool, is_replaced: bool) -> str:
    if is_draining:
        return f"[yellow]{name} drains[/]"
    return f"[red]{name} is lost[/], its answers go on elsewhere" + (
        "; Ray Serve replaces it if it has ended" * is_replaced
    )
