"""The client that blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from cluster.client.answers import Answer, PoolStatus, answer_of
from cluster.client.errors import call_error
from cluster.client.requests import (
    Message,
    Prompt,
    SamplingOptions,
    chat_request,
    detokenize_request,
    generate_request,
    tokenize_request,
)
from cluster.config import ClientConfig
from cluster.security.channel import open_channel
from cluster.transport import client_options
from protos import control_pb2, control_pb2_grpc, generation_pb2_grpc

T = TypeVar("T")


class AnswerStream:
    """The pieces of one answer, as they come. Leaving its `with` block, or dropping it, ends the request."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[Answer]:
        return self

    def __next__(self) -> Answer:
        try:
            return answer_of(next(self._call))
        except grpc.RpcError as error:
            raise call_error(error) from error

    def cancel(self) -> None:
        """End the request; the server frees what it holds."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class GraphpoolClient:
    """Calls one router or replica at `target` (host:port). Thread-safe; failed calls raise CallError.

    UNAVAILABLE and RESOURCE_EXHAUSTED are tried again, at the pace the server asks for, until the first message.
    `token` says who calls; without one GRAPHPOOL_TOKEN is looked at. Raises ValueError when it would travel in the clear.
    """

    def __init__(self, target: str, config: ClientConfig | None = None, *, token: str | None = None) -> None:
        self._config = config or ClientConfig()
        options = client_options(self._config)
        self._channel = open_channel(target, self._config.security, options, token)
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._control = control_pb2_grpc.ControlServiceStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Answer:
        """Continue a prompt; returns the whole answer."""
        request = generate_request(prompt, model=model, request_id=request_id, sampling=sampling)
        return answer_of(self._call(self._generation.Generate, request, timeout_s))

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AnswerStream:
        """Continue a prompt; the answer comes in pieces."""
        request = generate_request(prompt, model=model, request_id=request_id, sampling=sampling)
        return AnswerStream(self._generation.GenerateStream(request, timeout=self._timeout(timeout_s)))

    def chat(
        self,
        messages: Iterable[Message],
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Answer:
        """Answer a conversation; returns the whole answer."""
        request = chat_request(messages, model=model, request_id=request_id, sampling=sampling)
        return answer_of(self._call(self._generation.Chat, request, timeout_s))

    def chat_stream(
        self,
        messages: Iterable[Message],
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AnswerStream:
        """Answer a conversation; the answer comes in pieces."""
        request = chat_request(messages, model=model, request_id=request_id, sampling=sampling)
        return AnswerStream(self._generation.ChatStream(request, timeout=self._timeout(timeout_s)))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Iterable[Message] | None = None,
        add_special_tokens: bool = True,
        model: str = "",
        timeout_s: float | None = None,
    ) -> list[int]:
        """Token ids of a text, or of a conversation as the chat template renders it."""
        request = tokenize_request(text, messages, model=model, add_special_tokens=add_special_tokens)
        return list(self._call(self._generation.Tokenize, request, timeout_s).token_ids)

    def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = False,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """Text of token ids."""
        request = detokenize_request(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        return self._call(self._generation.Detokenize, request, timeout_s).text

    def status(self, *, timeout_s: float | None = None) -> PoolStatus:
        """The server and its replicas."""
        return PoolStatus(self.server_info(timeout_s=timeout_s), self.loads(timeout_s=timeout_s))

    def server_info(self, *, timeout_s: float | None = None) -> control_pb2.ServerInfo:
        """Who answers at the target."""
        return self._call(self._control.GetServerInfo, control_pb2.GetServerInfoRequest(), timeout_s)

    def model_info(self, model: str = "", *, timeout_s: float | None = None) -> control_pb2.ModelInfo:
        """The model that is served."""
        return self._call(self._control.GetModelInfo, control_pb2.GetModelInfoRequest(model=model), timeout_s)

    def loads(self, *, timeout_s: float | None = None) -> Sequence[control_pb2.ReplicaLoad]:
        """Every replica the server knows, with its state and load."""
        return list(self._call(self._control.GetLoads, control_pb2.GetLoadsRequest(), timeout_s).replicas)

    def drain(self, replica: str = "", *, grace_s: float, timeout_s: float | None = None) -> None:
        """Take no new requests and finish what is running; "" = the server itself. Returns when that is done."""
        request = control_pb2.DrainRequest(replica=replica, grace_s=grace_s)
        self._call(self._control.Drain, request, timeout_s)

    def abort(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """End a request early; False if there is none of that id."""
        request = control_pb2.AbortRequest(request_id=request_id)
        return self._call(self._control.Abort, request, timeout_s).found

    def close(self) -> None:
        """Hang up; what is running ends."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: grpc.UnaryUnaryMultiCallable[Any, T], request: Any, timeout_s: float | None) -> T:
        try:
            return method(request, timeout=self._timeout(timeout_s))
        except grpc.RpcError as error:
            raise call_error(error) from error

    def _timeout(self, timeout_s: float | None) -> float | None:
        return self._config.timeout_s if timeout_s is None else timeout_s
