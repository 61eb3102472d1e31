"""The state of a replica, and who is told when it changes."""

from __future__ import annotations

import enum
from collections.abc import Callable

from protos import control_pb2

Listener = Callable[[], None]


class State(enum.Enum):
    """A replica goes down this list, never up."""

    STARTING = control_pb2.REPLICA_STATE_STARTING
    READY = control_pb2.REPLICA_STATE_READY
    DRAINING = control_pb2.REPLICA_STATE_DRAINING
    STOPPED = control_pb2.REPLICA_STATE_STOPPED
    FAILED = control_pb2.REPLICA_STATE_FAILED


class Lifecycle:
    """Holds the state; STOPPED and FAILED are final."""

    def __init__(self) -> None:
        self._state = State.STARTING
        self._listeners: list[Listener] = []

    @property
    def state(self) -> State:
        """Where the replica stands."""
        return self._state

    def advance(self, state: State) -> bool:
        """Go to `state` and tell the listeners; False if the replica is there already or past it."""
        order = list(State)
        is_over = self._state in (State.STOPPED, State.FAILED)
        if is_over or order.index(state) <= order.index(self._state):
            return False
        self._state = state
        for listener in tuple(self._listeners):
            listener()
        return True

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` after every change, until the returned function is called."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)
