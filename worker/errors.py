"""Everything a worker can refuse or fail with.

    WorkerError
    ├── InvalidRequest          the client's fault; names the field
    ├── QueueFull               too much is waiting already; come back later
    ├── Draining                no new work is taken
    ├── DeadlineExceeded        the request's time ran out, queued or running
    ├── RequestAborted          somebody ended the request early
    ├── NumericalError          the model produced NaN or infinity for this row
    ├── EngineDead              the engine stopped; the process is about to exit
    │   └── WeightsCorrupted    memory that nobody writes has changed
    ├── EngineStalled           no step completed for too long while work exists
    └── ModelLoadError          the model cannot be served
        ├── UnsupportedModel    its architecture or one of its options is not implemented
        └── UnsafeCheckpoint    it holds something other than safetensors or GGUF, or asks to run its own code

Arguments go to `super().__init__` unchanged so that every error survives pickling across process borders.
"""

from __future__ import annotations


class WorkerError(Exception):
    """Base of all errors a worker raises on purpose."""


class InvalidRequest(WorkerError, ValueError):
    """A field of a request is not acceptable."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class QueueFull(WorkerError):
    """The waiting queue is at its limit; `retry_after_s` is a fair guess of when to come back."""

    def __init__(self, waiting: int, limit: int, retry_after_s: float = 1.0) -> None:
        super().__init__(waiting, limit, retry_after_s)
        self.waiting = waiting
        self.limit = limit
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.waiting} sequences are waiting and the limit is {self.limit}"


class Draining(WorkerError):
    """The worker finishes what it has and takes nothing new."""


class DeadlineExceeded(WorkerError):
    """The request's deadline passed before it was answered in full."""


class RequestAborted(WorkerError):
    """The request was ended early, by its client or by an operator."""


class NumericalError(WorkerError):
    """The logits of this request held NaN or infinity: no token was chosen from them."""


class EngineDead(WorkerError):
    """The engine thread ended with an error; nothing more can be served by this process."""


class WeightsCorrupted(EngineDead):
    """The model's memory is not what was loaded: what this process computes cannot be trusted any more."""

    def __init__(self, tensor: str) -> None:
        super().__init__(tensor)
        self.tensor = tensor

    def __str__(self) -> str:
        return f"{self.tensor} has changed in memory since it was loaded"


class EngineStalled(WorkerError):
    """Work exists, but no step was completed within its time."""


class ModelLoadError(WorkerError):
    """The model cannot be loaded."""


class UnsupportedModel(ModelLoadError):
    """The model's architecture, or an option in its config, is not implemented."""


class UnsafeCheckpoint(ModelLoadError):
    """The checkpoint would have to run foreign code: pickle files, or `auto_map`."""
