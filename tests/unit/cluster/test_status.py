from __future__ import annotations

import asyncio
import pickle
from typing import Any

import grpc
import pytest

from cluster import errors as cluster_errors
from cluster import status
from worker import errors as worker_errors

Code = grpc.StatusCode

EXAMPLES: list[tuple[Exception, grpc.StatusCode]] = [
    (worker_errors.InvalidRequest("n", "is bad"), Code.INVALID_ARGUMENT),
    (worker_errors.QueueFull(3, 2, 0.25), Code.RESOURCE_EXHAUSTED),
    (worker_errors.Draining(), Code.UNAVAILABLE),
    (worker_errors.DeadlineExceeded(), Code.DEADLINE_EXCEEDED),
    (worker_errors.RequestAborted(), Code.CANCELLED),
    (worker_errors.NumericalError(), Code.INTERNAL),
    (worker_errors.EngineDead(), Code.UNAVAILABLE),
    (worker_errors.WeightsCorrupted("lm_head"), Code.DATA_LOSS),
    (worker_errors.EngineStalled(), Code.UNAVAILABLE),
    (worker_errors.ModelLoadError("no"), Code.FAILED_PRECONDITION),
    (worker_errors.UnsupportedModel("no"), Code.FAILED_PRECONDITION),
    (worker_errors.UnsafeCheckpoint("no"), Code.FAILED_PRECONDITION),
    (cluster_errors.NoReplicaAvailable(1.0), Code.UNAVAILABLE),
    (cluster_errors.ReplicaLost("r", 3), Code.UNAVAILABLE),
    (cluster_errors.ReplicaUnresponsive("r", 3), Code.UNAVAILABLE),
    (cluster_errors.ReplicaUnsound("r", 3), Code.UNAVAILABLE),
    (cluster_errors.RemoteError(5, "no such model"), Code.NOT_FOUND),
    (cluster_errors.AnswerInterrupted(4, 37), Code.UNAVAILABLE),
    (cluster_errors.PoisonedRequest(), Code.INTERNAL),
    (cluster_errors.BrokenStream("r", 2, 4), Code.INTERNAL),
    (cluster_errors.CanaryFailed("r", "too few tokens"), Code.UNAVAILABLE),
    (cluster_errors.DuplicateRequest("a"), Code.ALREADY_EXISTS),
    (cluster_errors.UnknownModel("served"), Code.NOT_FOUND),
    (cluster_errors.UnknownReplica("r"), Code.NOT_FOUND),
    (cluster_errors.StaleIncarnation("r", "1"), Code.FAILED_PRECONDITION),
    (cluster_errors.TooManyStreams(8), Code.RESOURCE_EXHAUSTED),
    (cluster_errors.Overloaded("queue_full", 0.5), Code.RESOURCE_EXHAUSTED),
    (cluster_errors.SlowReader(8, "messages"), Code.RESOURCE_EXHAUSTED),
    (cluster_errors.AnswerTooLarge(8, 4), Code.RESOURCE_EXHAUSTED),
    (cluster_errors.MessageTooLarge(8, 4), Code.RESOURCE_EXHAUSTED),
    (cluster_errors.MalformedMessage("GenerateRequest"), Code.INVALID_ARGUMENT),
    (cluster_errors.NotReady("starting"), Code.FAILED_PRECONDITION),
    (cluster_errors.Unauthenticated("no token"), Code.UNAUTHENTICATED),
    (cluster_errors.NotPermitted("not for users"), Code.PERMISSION_DENIED),
    (cluster_errors.QuotaExceeded("8 tokens a second", 0.5), Code.RESOURCE_EXHAUSTED),
]


def subclasses(base: type[Exception]) -> set[type[Exception]]:
    """Of the two error modules alone: a client's errors are what a status becomes, not what becomes one."""
    found = set(base.__subclasses__())
    for child in tuple(found):
        found |= subclasses(child)
    return {kind for kind in found if kind.__module__ in ("worker.errors", "cluster.errors")}


ALL_ERRORS = subclasses(worker_errors.WorkerError) | subclasses(cluster_errors.ClusterError)


@pytest.mark.parametrize(("error", "code"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_each_error_ends_a_call_with_its_code_and_a_sentence(error: Exception, code: grpc.StatusCode) -> None:
    found = status.status_of(error)
    assert found.code is code
    assert found.details


def test_every_error_type_is_in_the_table_and_in_the_examples() -> None:
    assert ALL_ERRORS - {cluster_errors.RemoteError} <= status.CODES.keys()
    assert {type(error) for error, _ in EXAMPLES} == ALL_ERRORS


@pytest.mark.parametrize("error", [error for error, _ in EXAMPLES], ids=lambda value: type(value).__name__)
def test_errors_survive_pickling(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.args, str(copy)) == (type(error), error.args, str(error))


@pytest.mark.parametrize(("error", "code"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_a_status_keeps_its_meaning_over_the_attach_stream(error: Exception, code: grpc.StatusCode) -> None:
    before = status.status_of(error)
    after = status.status_of(status.remote_error(status.stream_error(error)))
    assert after == before
    assert after.code is code


def test_only_backpressure_carries_a_time_to_come_back() -> None:
    assert status.status_of(worker_errors.QueueFull(3, 2, 0.25)).trailers == (("grpc-retry-pushback-ms", "250"),)
    assert status.status_of(worker_errors.Draining()).trailers == ()


def test_a_slow_reader_and_messages_that_are_too_large_are_not_to_be_tried_again() -> None:
    slow, answer, request = (
        cluster_errors.SlowReader(1, "messages"),
        cluster_errors.AnswerTooLarge(2, 1),
        cluster_errors.MessageTooLarge(2, 1),
    )
    for error in (slow, answer, request):
        assert status.status_of(error).trailers == (("grpc-retry-pushback-ms", "-1"),)


def test_the_field_of_an_invalid_request_is_named() -> None:
    found = status.status_of(worker_errors.InvalidRequest("top_p", "7 is outside (0, 1]"))
    assert (found.field, found.details) == ("top_p", "top_p: 7 is outside (0, 1]")


def test_details_are_cut_to_a_kibibyte_between_characters() -> None:
    details = status.status_of(worker_errors.InvalidRequest("messages", "ä" * 100_000)).details
    assert 1000 < len(details.encode()) <= 1024


def test_an_unplanned_error_tells_neither_client_nor_log_what_it_says(caplog: pytest.LogCaptureFixture) -> None:
    prompt = "the " + "secret"
    try:
        raise KeyError(prompt)
    except KeyError as error:
        found = status.status_of(error)
    assert (found.code, found.details) == (Code.INTERNAL, "an internal error")
    assert prompt not in caplog.text
    assert "KeyError" in caplog.text


def test_what_killed_an_engine_stays_with_the_operator() -> None:
    details = status.status_of(worker_errors.EngineDead("CUDA error at /home/me/model")).details
    assert "CUDA" not in details


def test_a_replica_cannot_make_a_failure_look_like_success() -> None:
    assert status.status_of(cluster_errors.RemoteError(0, "fine")).code is Code.UNKNOWN


class RecordingContext:
    """As much of a servicer context as `abort` needs."""

    def __init__(self, *, is_done: bool = False) -> None:
        self.ended: tuple[Any, ...] | None = None
        self._is_done = is_done

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("request-id", "r1"),)

    def done(self) -> bool:
        return self._is_done

    async def abort(self, *status: Any) -> None:
        self.ended = status
        raise grpc.aio.AbortError


async def test_abort_keeps_the_trailers_that_are_set_already() -> None:
    context: Any = RecordingContext()
    with pytest.raises(grpc.aio.AbortError):
        async with status.on_error(context):
            raise worker_errors.QueueFull(3, 2, 0.25)
    assert context.ended[0] is Code.RESOURCE_EXHAUSTED
    assert context.ended[2] == (("request-id", "r1"), ("grpc-retry-pushback-ms", "250"))


async def test_cancellation_passes_through_untouched() -> None:
    context: Any = RecordingContext()
    with pytest.raises(asyncio.CancelledError):
        async with status.on_error(context):
            raise asyncio.CancelledError
    assert context.ended is None


async def test_an_error_after_the_client_left_is_no_error() -> None:
    context: Any = RecordingContext(is_done=True)
    with pytest.raises(asyncio.CancelledError):
        async with status.on_error(context):
            raise RuntimeError("the stream is closed")
    assert context.ended is None
