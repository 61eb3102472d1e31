"""Lines of `graphpool serve` about replicas that leave and join."""

from __future__ import annotations

from cluster.cli.pool_changes import PoolChanges
from protos import control_pb2

READY, FAILED = control_pb2.REPLICA_STATE_READY, control_pb2.REPLICA_STATE_FAILED
STARTING, DRAINING = control_pb2.REPLICA_STATE_STARTING, control_pb2.REPLICA_STATE_DRAINING


def load(name: str, incarnation: str, state: control_pb2.ReplicaState.ValueType = READY) -> control_pb2.ReplicaLoad:
    return control_pb2.ReplicaLoad(replica=name, incarnation=incarnation, state=state)


def told(changes: PoolChanges, *loads: control_pb2.ReplicaLoad, is_replaced: bool = True) -> list[str]:
    return changes.lines(loads, is_replaced=is_replaced)


def test_nothing_is_told_while_nothing_changes() -> None:
    changes = PoolChanges([load("a", "1")])
    assert told(changes, load("a", "1")) == []
    assert told(changes, load("a", "1"), load("b", "1", STARTING)) == []


def test_a_replica_that_was_silent_and_comes_back_is_no_new_process() -> None:
    changes = PoolChanges([load("a", "1")])
    assert "a is lost" in told(changes, load("a", "1", FAILED))[0]
    assert told(changes, load("a", "1", STARTING)) == []
    assert told(changes, load("a", "1")) == ["[green]a answers again[/], the same process"]


def test_a_successor_is_a_new_process_with_and_without_a_gap() -> None:
    changes = PoolChanges([load("a", "1")])
    told(changes)
    assert told(changes, load("a", "2")) == ["[green]a is ready[/] in a new process"]
    assert told(changes, load("a", "3")) == ["[green]a is ready[/] in a new process"]


def test_a_replica_that_was_never_there_is_just_ready() -> None:
    assert told(PoolChanges([]), load("a", "1")) == ["[green]a is ready[/]"]


def test_a_drain_is_no_loss() -> None:
    changes = PoolChanges([load("a", "1"), load("b", "1")])
    assert told(changes, load("a", "1", DRAINING), load("b", "1")) == ["[yellow]a drains[/]"]


def test_without_a_controller_nobody_is_said_to_replace_it() -> None:
    changes = PoolChanges([load("a", "1"), load("b", "1")])
    assert "Ray Serve" in told(changes, load("b", "1"))[0]
    assert "Ray Serve" not in told(changes, is_replaced=False)[0]
