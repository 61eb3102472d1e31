"""One table from errors to status codes, and the only ways errors leave a process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NoReturn

import grpc

from cluster import errors as cluster_errors
from cluster.handlers import Context
from protos import replica_pb2
from worker import errors as worker_errors

MAX_DETAILS_BYTES = 1024
PUSHBACK_KEY = "grpc-retry-pushback-ms"
REQUEST_ID_KEY = "request-id"
RESUME_INDEX_KEY = "resume-index"
"""Number of the first message that a stream ended without, UNAVAILABLE: `Resume` goes on there."""
POISON_KEY = "poison"
"""Set when the request itself ends replicas."""
NEVER_RETRY_MS = -1
ABORT_TIMEOUT_S = 5.0
"""For a status to find its place behind messages that were not read."""


_log = logging.getLogger(__name__)
_Code = grpc.StatusCode

CODES: dict[type[BaseException], grpc.StatusCode] = {
    TimeoutError: _Code.DEADLINE_EXCEEDED,
    worker_errors.WorkerError: _Code.INTERNAL,
    worker_errors.InvalidRequest: _Code.INVALID_ARGUMENT,
    worker_errors.QueueFull: _Code.RESOURCE_EXHAUSTED,
    worker_errors.Draining: _Code.UNAVAILABLE,
    worker_errors.DeadlineExceeded: _Code.DEADLINE_EXCEEDED,
    worker_errors.RequestAborted: _Code.CANCELLED,
    worker_errors.NumericalError: _Code.INTERNAL,
    worker_errors.EngineDead: _Code.UNAVAILABLE,
    worker_errors.WeightsCorrupted: _Code.DATA_LOSS,
    worker_errors.EngineStalled: _Code.UNAVAILABLE,
    worker_errors.ModelLoadError: _Code.FAILED_PRECONDITION,
    worker_errors.UnsupportedModel: _Code.FAILED_PRECONDITION,
    worker_errors.UnsafeCheckpoint: _Code.FAILED_PRECONDITION,
    cluster_errors.ClusterError: _Code.INTERNAL,
    cluster_errors.NoReplicaAvailable: _Code.UNAVAILABLE,
    cluster_errors.ReplicaLost: _Code.UNAVAILABLE,
    cluster_errors.ReplicaUnresponsive: _Code.UNAVAILABLE,
    cluster_errors.ReplicaUnsound: _Code.UNAVAILABLE,
    cluster_errors.AnswerInterrupted: _Code.UNAVAILABLE,
    cluster_errors.PoisonedRequest: _Code.INTERNAL,
    cluster_errors.BrokenStream: _Code.INTERNAL,
    cluster_errors.CanaryFailed: _Code.UNAVAILABLE,
    cluster_errors.DuplicateRequest: _Code.ALREADY_EXISTS,
    cluster_errors.UnknownModel: _Code.NOT_FOUND,
    cluster_errors.UnknownReplica: _Code.NOT_FOUND,
    cluster_errors.StaleIncarnation: _Code.FAILED_PRECONDITION,
    cluster_errors.TooManyStreams: _Code.RESOURCE_EXHAUSTED,
    cluster_errors.Overloaded: _Code.RESOURCE_EXHAUSTED,
    cluster_errors.SlowReader: _Code.RESOURCE_EXHAUSTED,
    cluster_errors.AnswerTooLarge: _Code.RESOURCE_EXHAUSTED,
    cluster_errors.MessageTooLarge: _Code.RESOURCE_EXHAUSTED,
    cluster_errors.MalformedMessage: _Code.INVALID_ARGUMENT,
    cluster_errors.NotReady: _Code.FAILED_PRECONDITION,
    cluster_errors.Unauthenticated: _Code.UNAUTHENTICATED,
    cluster_errors.NotPermitted: _Code.PERMISSION_DENIED,
    cluster_errors.QuotaExceeded: _Code.RESOURCE_EXHAUSTED,
}
"""Every error type but RemoteError, which carries its own code. A type that is missing here takes its base's code."""

_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode if code is not _Code.OK}
_NEVER_RETRIED = (cluster_errors.SlowReader, cluster_errors.AnswerTooLarge, cluster_errors.MessageTooLarge)

_FIXED_DETAILS: dict[type[BaseException], str] = {
    TimeoutError: "the deadline passed before the answer was complete",
    worker_errors.Draining: "the server is draining and takes no new requests",
    worker_errors.DeadlineExceeded: "the deadline passed before the answer was complete",
    worker_errors.RequestAborted: "the request was aborted",
    worker_errors.NumericalError: "the model produced NaN or infinity for this request",
    worker_errors.EngineDead: "the engine of the replica stopped",
    worker_errors.WeightsCorrupted: "the memory of the replica has changed by itself: what it sent may be wrong",
    worker_errors.EngineStalled: "the engine of the replica makes no progress",
}
"""Errors whose own message is for the operator (it may quote a driver or a path); clients are told this instead."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a client is told: a code, at most 1 KiB of details, and when to come back (milliseconds, -1 = never)."""

    code: grpc.StatusCode
    details: str
    field: str = ""
    retry_after_ms: int = 0

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        """Trailing metadata that goes with the code."""
        if self.code is not _Code.RESOURCE_EXHAUSTED or self.retry_after_ms == 0:
            return ()
        return ((PUSHBACK_KEY, str(self.retry_after_ms)),)


def code_of(error: BaseException) -> grpc.StatusCode:
    """The code of `status_of`, without logging anything."""
    if isinstance(error, cluster_errors.RemoteError):
        return _BY_NUMBER.get(error.code, _Code.UNKNOWN)
    return _planned(error) or _Code.INTERNAL


def status_of(error: BaseException) -> Status:
    """The status an error ends an RPC with. An error nobody planned for is INTERNAL and only its place is logged."""
    if isinstance(error, cluster_errors.RemoteError):
        return Status(code_of(error), cut(error.message), error.field, error.retry_after_ms)
    planned = _planned(error)
    if planned is None:
        _log_unplanned(error)
        return Status(_Code.INTERNAL, "an internal error")
    return Status(planned, cut(_details(error)), getattr(error, "field", ""), _retry_after_ms(error))


def stream_error(error: BaseException) -> replica_pb2.StreamError:
    """The same status as it travels from a replica to a router."""
    status = status_of(error)
    return replica_pb2.StreamError(
        code=status.code.value[0],
        message=status.details,
        field=cut(status.field),
        retry_after_ms=status.retry_after_ms,
    )


def remote_error(error: replica_pb2.StreamError) -> cluster_errors.RemoteError:
    """What a router raises for a replica's StreamError."""
    return cluster_errors.RemoteError(error.code, cut(error.message), error.field, error.retry_after_ms)


@contextlib.asynccontextmanager
async def on_error(context: Context) -> AsyncIterator[None]:
    """End the RPC with the right status when the body raises; cancellation passes through, as gRPC needs it to."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        if context.done():
            raise asyncio.CancelledError from error
        await abort(context, error)


async def abort(context: Context, error: BaseException) -> NoReturn:
    """End an RPC with the status of `error`, keeping the trailing metadata set so far."""
    status = status_of(error)
    trailers = (*(context.trailing_metadata() or ()), *status.trailers)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await context.abort(status.code, status.details, trailers)
    # The client has stopped reading. gRPC keeps the status for when it goes on; this side is through with the call.
    raise asyncio.CancelledError


def cut(text: str) -> str:
    """At most MAX_DETAILS_BYTES of UTF-8, without half a character at the end."""
    raw = text.encode("utf-8", "replace")
    return raw[:MAX_DETAILS_BYTES].decode("utf-8", "ignore")


def _planned(error: BaseException) -> grpc.StatusCode | None:
    return next((CODES[base] for base in type(error).__mro__ if base in CODES), None)


def _details(error: BaseException) -> str:
    return _FIXED_DETAILS.get(type(error)) or str(error)


def _retry_after_ms(error: BaseException) -> int:
    if isinstance(error, _NEVER_RETRIED):
        return NEVER_RETRY_MS
    seconds = getattr(error, "retry_after_s", None)
    return 0 if seconds is None else max(1, round(1000 * seconds))


def _log_unplanned(error: BaseException) -> None:
    """Type and place only: the message of a foreign error may quote what the client sent."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    _log.error("unplanned %s\n%s", type(error).__name__, frames)
