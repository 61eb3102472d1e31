"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from cluster.client.answers import Answer, PoolStatus, answer_of
from cluster.client.base import BaseAnswerStream, BaseClient
from cluster.client.endpoints import Endpoint
from cluster.client.errors import Cancelled, call_error
from cluster.client.failover import Progress
from cluster.client.requests import (
    AnswerOptions,
    Message,
    Prompt,
    chat_request,
    detokenize_request,
    generate_request,
    request_arguments,
    tokenize_request,
)
from cluster.security.channel import open_aio_channel
from cluster.transport import Options
from protos import control_pb2

T = TypeVar("T")


class AsyncAnswerStream(BaseAnswerStream):
    """The pieces of one answer, as they come. Leaving its `async with` block, or dropping it, ends the request."""

    def __aiter__(self) -> AsyncIterator[Answer]:
        return self

    async def __anext__(self) -> Answer:
        while True:
            try:
                response = await self._call.read()
            except grpc.aio.AioRpcError as error:
                await self._go_on(error)
                continue
            except asyncio.CancelledError:
                if self._is_cancelled:
                    raise Cancelled(grpc.StatusCode.CANCELLED, "the client ended the request") from None
                raise
            if response is grpc.aio.EOF:  # type: ignore[attr-defined]
                raise StopAsyncIteration
            return self._take(response)

    async def _go_on(self, error: grpc.aio.AioRpcError) -> None:
        """Ask another server for the rest. Raises StopAsyncIteration when there is none, and what ends the answer."""
        if self._progress.is_complete:
            raise StopAsyncIteration
        await asyncio.sleep(self._leave(error))
        self._call_endpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncGraphpoolClient(BaseClient):
    """Calls one router or replica at `target` (host:port), or the first of several that answers, on one event loop. Failed calls raise CallError.

    Several are given as `targets`, or separated by commas. An answer that breaks off because its router is gone goes on
    through the next one, without a token lost or repeated; before its first message it is asked for again there.
    UNAVAILABLE and RESOURCE_EXHAUSTED are tried again, at the pace the server asks for, until the first message.
    `token` says who calls; without one GRAPHPOOL_TOKEN is looked at. Raises ValueError when it would travel in the clear.
    """

    async def generate(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> Answer:
        """Continue a prompt; returns the whole answer."""
        request = generate_request(prompt, **request_arguments(options))
        response = await self._call(lambda one: one.generation.Generate, request, options.get("timeout_s"))
        return answer_of(response)

    def stream(self, prompt: Prompt, **options: Unpack[AnswerOptions]) -> AsyncAnswerStream:
        """Continue a prompt; the answer comes in pieces."""
        request = generate_request(prompt, **request_arguments(options))
        return AsyncAnswerStream(self._endpoints, Progress(request), self._failover(options.get("timeout_s")))

    async def chat(self, messages: Iterable[Message], **options: Unpack[AnswerOptions]) -> Answer:
        """Answer a conversation; returns the whole answer."""
        request = chat_request(messages, **request_arguments(options))
        response = await self._call(lambda one: one.generation.Chat, request, options.get("timeout_s"))
        return answer_of(response)

    def chat_stream(self, messages: Iterable[Message], **options: Unpack[AnswerOptions]) -> AsyncAnswerStream:
        """Answer a conversation; the answer comes in pieces."""
        request = chat_request(messages, **request_arguments(options))
        return AsyncAnswerStream(self._endpoints, Progress(request), self._failover(options.get("timeout_s")))

    async def tokenize(
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
        return list((await self._call(lambda one: one.generation.Tokenize, request, timeout_s)).token_ids)

    async def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = False,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """Text of token ids."""
        request = detokenize_request(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        text: str = (await self._call(lambda one: one.generation.Detokenize, request, timeout_s)).text
        return text

    async def status(self, *, timeout_s: float | None = None) -> PoolStatus:
        """The server and its replicas."""
        return PoolStatus(await self.server_info(timeout_s=timeout_s), await self.loads(timeout_s=timeout_s))

    async def server_info(self, *, timeout_s: float | None = None) -> control_pb2.ServerInfo:
        """Who answers at the target."""
        return await self._call(lambda one: one.control.GetServerInfo, control_pb2.GetServerInfoRequest(), timeout_s)

    async def model_info(self, model: str = "", *, timeout_s: float | None = None) -> control_pb2.ModelInfo:
        """The model that is served."""
        return await self._call(
            lambda one: one.control.GetModelInfo, control_pb2.GetModelInfoRequest(model=model), timeout_s
        )

    async def loads(self, *, timeout_s: float | None = None) -> Sequence[control_pb2.ReplicaLoad]:
        """Every replica the server knows, with its state and load."""
        return list(
            (await self._call(lambda one: one.control.GetLoads, control_pb2.GetLoadsRequest(), timeout_s)).replicas
        )

    async def drain(self, replica: str = "", *, grace_s: float, timeout_s: float | None = None) -> None:
        """Take no new requests and finish what is running; "" = the server itself. Returns when that is done."""
        request = control_pb2.DrainRequest(replica=replica, grace_s=grace_s)
        await self._call(lambda one: one.control.Drain, request, timeout_s)

    async def abort(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """End a request early; False if there is none of that id."""
        request = control_pb2.AbortRequest(request_id=request_id)
        found = False
        for endpoint in self._endpoints.all:
            try:
                reply = await endpoint.control.Abort(request, timeout=self._timeout(timeout_s))
            except grpc.aio.AioRpcError as error:
                if len(self._endpoints.all) == 1 or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise call_error(error) from error
            else:
                found = found or reply.found
        return found

    async def close(self) -> None:
        """Hang up; what is running ends."""
        for endpoint in self._endpoints.all:
            await endpoint.channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(
        self,
        method: Callable[[Endpoint], grpc.aio.UnaryUnaryMultiCallable[Any, T]],
        request: Any,
        timeout_s: float | None,
    ) -> T:
        endpoint, failover = self._endpoints.current, self._failover(timeout_s)
        while True:
            try:
                return await method(endpoint)(request, timeout=failover.timeout_s)
            except grpc.aio.AioRpcError as error:
                endpoint, pause_s = self._leave(endpoint, failover, error)
                await asyncio.sleep(pause_s)

    def _open_channel(self, address: str, options: Options, token: str | None) -> grpc.aio.Channel:
        return open_aio_channel(address, self._config.security, options, token)
