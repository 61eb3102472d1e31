"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from cluster.client.answers import Answer, PoolStatus, answer_of
from cluster.client.criticality import with_criticality
from cluster.client.endpoints import Endpoint, Endpoints, addresses_of
from cluster.client.errors import Cancelled, call_error
from cluster.client.failover import Failover, Progress
from cluster.client.requests import (
    CacheArguments,
    Message,
    Prompt,
    SamplingOptions,
    chat_request,
    check_timeout,
    detokenize_request,
    generate_request,
    tokenize_request,
)
from cluster.config import ClientConfig
from cluster.security.channel import open_aio_channel
from cluster.transport import client_options
from protos import control_pb2

T = TypeVar("T")


class AsyncAnswerStream:
    """The pieces of one answer, as they come. Leaving its `async with` block, or dropping it, ends the request."""

    def __init__(self, endpoints: Endpoints, progress: Progress, failover: Failover) -> None:
        self._endpoints = endpoints
        self._progress = progress
        self._failover = failover
        self._endpoint = endpoints.current
        self._call = progress.call(self._endpoint, failover.timeout_s)
        self._is_cancelled = False

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
            self._progress.note(response)
            self._failover.note_progress()
            return answer_of(response)

    def cancel(self) -> None:
        """End the request; the server frees what it holds."""
        self._is_cancelled = True
        self._call.cancel()

    async def _go_on(self, error: grpc.aio.AioRpcError) -> None:
        """Ask another server for the rest. Raises StopAsyncIteration when there is none, and what ends the answer."""
        if self._progress.is_complete:
            raise StopAsyncIteration
        pause_s = self._failover.pause_s(error.code(), is_resuming=self._progress.has_begun)
        if pause_s is None or self._is_cancelled:
            raise call_error(error) from error
        self._endpoint = self._endpoints.leave(self._endpoint)
        await asyncio.sleep(pause_s)
        self._call = self._progress.call(self._endpoint, self._failover.timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncGraphpoolClient:
    """Calls one router or replica at `target` (host:port), or the first of several that answers, on one event loop. Failed calls raise CallError.

    Several are given as `targets`, or separated by commas. An answer that breaks off because its router is gone goes on
    through the next one, without a token lost or repeated; before its first message it is asked for again there.
    UNAVAILABLE and RESOURCE_EXHAUSTED are tried again, at the pace the server asks for, until the first message.
    `token` says who calls; without one GRAPHPOOL_TOKEN is looked at. Raises ValueError when it would travel in the clear.
    """

    def __init__(
        self,
        target: str = "",
        config: ClientConfig | None = None,
        *,
        targets: Sequence[str] = (),
        token: str | None = None,
    ) -> None:
        self._config = config or ClientConfig()
        addresses = addresses_of(target, targets)
        options = client_options(self._config, is_alone=len(addresses) == 1)
        security = self._config.security
        self._endpoints = Endpoints(
            addresses,
            lambda address: with_criticality(open_aio_channel(address, security, options, token), self._config),
        )

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        use_prefix_cache: bool | None = None,
        cache_salt: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Answer:
        """Continue a prompt; returns the whole answer."""
        cache: CacheArguments = {"use_prefix_cache": use_prefix_cache, "cache_salt": cache_salt}
        request = generate_request(prompt, model=model, request_id=request_id, sampling=sampling, **cache)
        response = await self._call(lambda one: one.generation.Generate, request, timeout_s)
        return answer_of(response)

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        use_prefix_cache: bool | None = None,
        cache_salt: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncAnswerStream:
        """Continue a prompt; the answer comes in pieces."""
        cache: CacheArguments = {"use_prefix_cache": use_prefix_cache, "cache_salt": cache_salt}
        request = generate_request(prompt, model=model, request_id=request_id, sampling=sampling, **cache)
        return AsyncAnswerStream(self._endpoints, Progress(request), self._failover(timeout_s))

    async def chat(
        self,
        messages: Iterable[Message],
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        use_prefix_cache: bool | None = None,
        cache_salt: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Answer:
        """Answer a conversation; returns the whole answer."""
        cache: CacheArguments = {"use_prefix_cache": use_prefix_cache, "cache_salt": cache_salt}
        request = chat_request(messages, model=model, request_id=request_id, sampling=sampling, **cache)
        response = await self._call(lambda one: one.generation.Chat, request, timeout_s)
        return answer_of(response)

    def chat_stream(
        self,
        messages: Iterable[Message],
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        use_prefix_cache: bool | None = None,
        cache_salt: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncAnswerStream:
        """Answer a conversation; the answer comes in pieces."""
        cache: CacheArguments = {"use_prefix_cache": use_prefix_cache, "cache_salt": cache_salt}
        request = chat_request(messages, model=model, request_id=request_id, sampling=sampling, **cache)
        return AsyncAnswerStream(self._endpoints, Progress(request), self._failover(timeout_s))

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
                pause_s = failover.pause_s(error.code())
                if pause_s is None:
                    raise call_error(error) from error
                endpoint = self._endpoints.leave(endpoint)
                await asyncio.sleep(pause_s)

    def _failover(self, timeout_s: float | None) -> Failover:
        return Failover(len(self._endpoints.all), self._config, self._timeout(timeout_s))

    def _timeout(self, timeout_s: float | None) -> float | None:
        return self._config.timeout_s if timeout_s is None else check_timeout(timeout_s)
