"""Going on at another server: whether, when, and with what."""

from __future__ import annotations

import time
from typing import Any

import grpc

from cluster.client.endpoints import Endpoint
from cluster.codec import AnyRequest
from cluster.config import ClientConfig
from cluster.delivered import Delivered
from protos import generation_pb2

LEAST_TIMEOUT_S = 0.001
"""For a call that is made when the time is up: it ends DEADLINE_EXCEEDED like one that took too long."""
Response = generation_pb2.GenerateResponse | generation_pb2.ChatResponse


class Failover:
    """Counts the failures of one call in a row, over all servers. With a single server there is nowhere to go on."""

    def __init__(self, num_endpoints: int, config: ClientConfig, timeout_s: float | None) -> None:
        self._num_endpoints = num_endpoints
        self._config = config
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_failures = 0

    @property
    def timeout_s(self) -> float | None:
        """What is left of the call's time; None = as long as it takes."""
        if self._deadline_s is None:
            return None
        return max(self._deadline_s - time.monotonic(), LEAST_TIMEOUT_S)

    def note_progress(self) -> None:
        """Something came: the next failure is a first one again."""
        self._num_failures = 0

    def pause_s(self, code: grpc.StatusCode, *, is_resuming: bool = False) -> float | None:
        """How long to wait before the next server is called: 0 until all have failed once; None = give up.

        A server that still answers the call that broke off refuses the resumed one for as long as it takes to notice.
        """
        may_repeat = code is grpc.StatusCode.UNAVAILABLE or (is_resuming and code is grpc.StatusCode.ALREADY_EXISTS)
        is_over = self._num_failures >= self._num_endpoints * self._config.max_attempts
        if self._num_endpoints == 1 or not may_repeat or is_over:
            return None
        self._num_failures += 1
        num_rounds = self._num_failures // self._num_endpoints
        if num_rounds == 0:
            return 0.0
        return min(self._config.backoff_min_s * 2.0 ** (num_rounds - 1), self._config.backoff_max_s)


class Progress:
    """What has come of one answer, and the call that brings the rest of it."""

    def __init__(self, request: AnyRequest) -> None:
        self._request = request
        self._delivered = Delivered()

    @property
    def has_begun(self) -> bool:
        """Whether a message has come: from then on the answer is resumed, not asked for again."""
        return self._delivered.next_sequence > 0

    @property
    def is_complete(self) -> bool:
        """Whether the last message has come."""
        return self._delivered.is_complete

    def note(self, response: Response) -> None:
        """The next message has come."""
        self._delivered.note(response)
        if response.HasField("seed"):
            self._request.sampling.seed = response.seed
        self._request.request_id = response.request_id

    def call(self, endpoint: Endpoint, timeout_s: float | None) -> Any:
        """Ask for what is missing."""
        is_chat = isinstance(self._request, generation_pb2.ChatRequest)
        if not self.has_begun:
            method = endpoint.generation.ChatStream if is_chat else endpoint.generation.GenerateStream
            return method(self._request, timeout=timeout_s)
        parts: dict[str, Any] = {
            "request": self._request,
            "delivered": self._delivered.to_proto(),
            "next_sequence": self._delivered.next_sequence,
        }
        if is_chat:
            return endpoint.generation.ResumeChat(generation_pb2.ResumeChatRequest(**parts), timeout=timeout_s)
        return endpoint.generation.Resume(generation_pb2.ResumeRequest(**parts), timeout=timeout_s)
