"""The face an engine shows to the process that hosts it, and the one thing a host must provide: a sink for events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from worker.load import EngineInfo, LoadSnapshot
from worker.request import EngineEvent, GenerateRequest

EventSink = Callable[[Sequence[EngineEvent]], None]
"""Called on the engine's thread, once a step, with everything that step brought; it must return at once."""


class EngineService(Protocol):
    """A running engine. Every method may be called from any thread and returns without waiting for a step.

    Events of one request arrive in order. A request ends with either one ChoiceDelta with a finish reason for each of
    its choices, or one RequestFailed; after a `cancel` it may also end silently.
    """

    @property
    def info(self) -> EngineInfo:
        """The model and the shapes it is served in."""

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request. Raises InvalidRequest, QueueFull, Draining or EngineDead; then no event follows."""

    def cancel(self, request_id: str) -> None:
        """End a request and free its rows and blocks by the next step. Unknown ids are ignored."""

    def load(self) -> LoadSnapshot:
        """A snapshot taken after the last step."""

    def check(self) -> None:
        """Raise EngineDead or EngineStalled when the engine makes no progress although it has work."""

    def drain(self) -> None:
        """Take no new requests from now on; what was taken goes on."""

    def stop(self) -> None:
        """End all requests with EngineDead and join the thread."""
