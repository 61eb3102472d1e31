"""One simulated RPC, as its caller and as its server see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from tests.chaos.sim_way import Pipe

if TYPE_CHECKING:
    from tests.chaos.sim_network import SimNetwork

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class SimCall:
    """The caller's side of one RPC."""

    def __init__(
        self, network: SimNetwork, source: str, address: str, path: str, request: Any, timeout: float | None
    ) -> None:
        host = network.hosts.get(address)
        target = host.name if host is not None else address
        self._network, self._path, self._address = network, path, address
        self._way = network.way(source, target)
        self._out = Pipe(network.way(source, target), network.latency_s)
        self._in = Pipe(network.way(target, source), network.latency_s)
        self._error: grpc.aio.AioRpcError | None = None
        self._over = asyncio.Event()
        self._deadline_s = None if timeout is None else asyncio.get_running_loop().time() + timeout
        if request is not None:
            self._out.send(request)
        self._server = asyncio.create_task(self._serve())

    async def read(self) -> Any:
        """The next message, or EOF. Raises AioRpcError."""
        if self._over.is_set():
            return self._finish()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                item = await self._in.arrived.get()
        except TimeoutError:
            self._out.send(_CANCEL)
            self._end(rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
            return self._finish()
        if isinstance(item, _Status):
            self._end(None if item.code is grpc.StatusCode.OK else rpc_error(item.code, item.details, item.trailers))
        return self._finish() if self._over.is_set() else item

    async def write(self, message: Any) -> None:
        if self._over.is_set():
            raise self._error or asyncio.InvalidStateError("the call is over")
        self._out.send(message)

    def cancel(self) -> bool:
        """The server learns of it when its way is open."""
        if self._over.is_set():
            return False
        self._out.send(_CANCEL)
        self._end(rpc_error(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
        return True

    async def code(self) -> grpc.StatusCode:
        await self._over.wait()
        return self._error.code() if self._error is not None else grpc.StatusCode.OK

    async def details(self) -> str:
        await self._over.wait()
        return (self._error.details() or "") if self._error is not None else ""

    def lose(self, why: str) -> None:
        """The server's side is gone."""
        self._server.cancel()
        self._in.send(_Status(grpc.StatusCode.UNAVAILABLE, why))

    def _finish(self) -> Any:
        if self._error is not None:
            raise self._error
        return EOF

    def _end(self, error: grpc.aio.AioRpcError | None) -> None:
        if not self._over.is_set():
            self._error = error
            self._over.set()
            self._in.close()
            self._in.arrived.put_nowait(None)  # wakes a reader

    async def _serve(self) -> None:
        await self._way.wait()
        host = self._network.hosts.get(self._address)
        if host is None or not host.is_alive:
            self._in.send(_Status(grpc.StatusCode.UNAVAILABLE, "connection refused"))
            return
        handler = host.handlers.get(self._path)
        if handler is None:
            self._in.send(_Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
            return
        host.calls.append(self)
        context = SimContext(self._out, self._in, self._deadline_s)
        # Tasks of the server are of its host, not of the caller's.
        work = asyncio.create_task(_handle(handler, context), context=host.context)
        cancelled = asyncio.create_task(context.cancelled_by_peer.wait())
        try:
            await asyncio.wait((work, cancelled), return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            cancelled.cancel()
            host.calls.remove(self)
            results = await asyncio.gather(work, return_exceptions=True)
            self._out.close()
        self._in.send(_status_of(results[0], context))


_CANCEL = object()


@dataclass(frozen=True, slots=True)
class _Status:
    code: grpc.StatusCode
    details: str = ""
    trailers: tuple[tuple[str, str], ...] = ()


class SimContext:
    """The server's side of one RPC."""

    def __init__(self, incoming: Pipe, outgoing: Pipe, deadline_s: float | None) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._deadline_s = deadline_s
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._trailers: tuple[tuple[str, str], ...] = ()
        self.status: _Status | None = None
        self.cancelled_by_peer = asyncio.Event()
        self._sorter = asyncio.create_task(self._sort())

    async def read(self) -> Any:
        return await self._messages.get()

    async def write(self, message: Any) -> None:
        self._outgoing.send(message)
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self.status = _Status(code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._trailers = tuple(metadata)

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._trailers

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - asyncio.get_running_loop().time()

    def done(self) -> bool:
        return self.cancelled_by_peer.is_set()

    def cancelled(self) -> bool:
        return self.cancelled_by_peer.is_set()

    def close(self) -> None:
        self._sorter.cancel()

    async def _sort(self) -> None:
        while True:
            item = await self._incoming.arrived.get()
            if item is _CANCEL:
                self.cancelled_by_peer.set()
            else:
                self._messages.put_nowait(item)


async def _handle(handler: Any, context: SimContext) -> None:
    try:
        if handler.request_streaming:
            await handler.stream_stream(None, context)
            return
        request = await context.read()
        if handler.response_streaming:
            work = handler.unary_stream(request, context)
            if isinstance(work, AsyncIterator):
                async for message in work:
                    await context.write(message)
            else:
                await work
            return
        await context.write(await handler.unary_unary(request, context))
    finally:
        context.close()


def _status_of(result: object, context: SimContext) -> _Status:
    if context.status is not None:
        return context.status
    if result is None:
        return _Status(grpc.StatusCode.OK)
    if isinstance(result, asyncio.CancelledError):
        return _Status(grpc.StatusCode.CANCELLED, "cancelled")
    return _Status(grpc.StatusCode.UNKNOWN, f"unexpected {type(result).__name__}")


def rpc_error(code: grpc.StatusCode, details: str, trailers: tuple[tuple[str, str], ...] = ()) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*trailers)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details, None)
