"""What a call can end with: one type for each status code that servers use.

CallError
├── InvalidArgument      a field of the request is wrong; the details name it
├── NotFound             another model is served
├── AlreadyExists        the request id is live already
├── Unauthenticated      the server does not know who calls: a token is missing or wrong
├── PermissionDenied     the caller may not do this
├── FailedPrecondition   the server has not loaded its model
├── ResourceExhausted    too much is going on; come back after `retry_after_s`
├── Unavailable          nobody can take the request, or whoever had it is gone
├── DeadlineExceeded     the deadline passed before the answer was complete
├── Cancelled            somebody ended the request
├── DataLoss             the replica's weights have changed in memory: the answer so far may be wrong
└── InternalError        the server's fault
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from cluster.errors import ClusterError
from cluster.status import POISON_KEY, PUSHBACK_KEY, REQUEST_ID_KEY, RESUME_INDEX_KEY


class CallError(ClusterError):
    """A call ended with this status; `details` is the server's sentence."""

    def __init__(
        self,
        code: grpc.StatusCode,
        details: str,
        retry_after_s: float | None = None,
        request_id: str = "",
        resume_index: int | None = None,
        is_poison: bool = False,
    ) -> None:
        super().__init__(code, details, retry_after_s, request_id, resume_index, is_poison)
        self.code = code
        self.details = details
        self.retry_after_s = retry_after_s
        """When the server wants to be asked again; None = it did not say."""
        self.request_id = request_id
        self.resume_index = resume_index
        """Number of the message with which `Resume` goes on with an answer that broke off; None = there is nothing."""
        self.is_poison = is_poison
        """The request ends the replica that computes it: it is never worth another try."""

    def __str__(self) -> str:
        return f"{self.code.name}: {self.details}"


class InvalidArgument(CallError):
    """A field of the request is wrong."""


class NotFound(CallError):
    """Another model is served, or there is no such replica."""


class AlreadyExists(CallError):
    """A request of this id is being answered."""


class Unauthenticated(CallError):
    """The server does not know who calls."""


class PermissionDenied(CallError):
    """The caller's roles do not reach this far."""


class FailedPrecondition(CallError):
    """The server is not in a state to answer."""


class ResourceExhausted(CallError):
    """The server has more to do than it takes on."""


class Unavailable(CallError):
    """Nobody can take the request, or the answer broke off."""


class DeadlineExceeded(CallError):
    """The deadline passed."""


class Cancelled(CallError):
    """The request was ended early."""


class DataLoss(CallError):
    """The replica's weights have changed in memory; what it has answered may be wrong."""


class InternalError(CallError):
    """The server's fault."""


_TYPES: dict[grpc.StatusCode, type[CallError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.DATA_LOSS: DataLoss,
    grpc.StatusCode.INTERNAL: InternalError,
}


def call_error(error: Any) -> CallError:
    """The typed form of a `grpc.RpcError`."""
    code: grpc.StatusCode = error.code()
    trailers = dict(error.trailing_metadata() or ())
    resume_index = trailers.get(RESUME_INDEX_KEY)
    return _TYPES.get(code, CallError)(
        code,
        error.details() or "",
        _retry_after_s(trailers),
        trailers.get(REQUEST_ID_KEY, ""),
        None if resume_index is None else int(resume_index),
        trailers.get(POISON_KEY) == "true",
    )


def _retry_after_s(trailers: Mapping[str, str]) -> float | None:
    pushback_ms = int(trailers.get(PUSHBACK_KEY, -1))
    return pushback_ms / 1000 if pushback_ms >= 0 else None
