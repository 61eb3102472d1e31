"""gRPC without sockets, on one event loop: real stubs call real servicers over links that can be broken.

A message takes `latency_s`; one that is sent while its way is blocked arrives, in order, once it is
open again, as TCP would have it, unless the connection is given up before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import grpc

SERVED_BY = ("cluster.replica.server", "cluster.router.server")
DIALED_BY = ("cluster.router.connection", "cluster.replica.announcer")
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


@dataclass(slots=True)
class Host:
    """One process."""

    name: str
    address: str
    handlers: dict[str, Any] = field(default_factory=dict)
    is_alive: bool = True
    calls: list[SimCall] = field(default_factory=list)
    context: Context = field(default_factory=copy_context)

    def die(self) -> None:
        """Every connection breaks; who made it learns so over the way back, if that is open."""
        self.is_alive = False
        self.handlers.clear()
        for call in tuple(self.calls):
            call.lose("connection reset")


class SimNetwork:
    """Everything that is listening, and the ways between."""

    def __init__(self, latency_s: float = 0.0005) -> None:
        self.latency_s = latency_s
        self.hosts: dict[str, Host] = {}
        self._ports = itertools.count(20000)
        self._ways: dict[tuple[str, str], _Way] = {}

    def way(self, source: str, target: str) -> _Way:
        """Between two hosts, by their names."""
        return self._ways.setdefault((source, target), _Way())

    def block(self, source: str, target: str) -> None:
        self.way(source, target).set_open(False)

    def open(self, source: str, target: str) -> None:
        self.way(source, target).set_open(True)

    def channel(self, source: str, address: str) -> SimChannel:
        """From the host of that name to whoever listens at the address."""
        return SimChannel(self, source, address)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Routers and replicas that are made in the block use this network."""
        with contextlib.ExitStack() as stack:
            for module in SERVED_BY:
                stack.enter_context(mock.patch(f"{module}.create_server", lambda **_: SimServer(self)))  # noqa: PT008  # a new one each time
                stack.enter_context(mock.patch(f"{module}.bind", lambda server, *_, **__: server.port))
            for module in DIALED_BY:
                stack.enter_context(mock.patch(f"{module}.open_link_channel", self._open_link))
            yield

    def _open_link(self, address: str, *_: Any, **__: Any) -> SimChannel:
        return self.channel(HOST.get(), address)

    def listen(self, server: SimServer) -> Host:
        address = f"127.0.0.1:{server.port}"
        host = self.hosts[address] = Host(HOST.get(), address, server.handlers)
        return host

    def new_port(self) -> int:
        return next(self._ports)


HOST: ContextVar[str] = ContextVar("host", default="client")
"""Name of the host whose tasks run."""


class SimServer:
    """What the generated `add_..._to_server` functions need of a server."""

    def __init__(self, network: SimNetwork) -> None:
        self.network = network
        self.port = network.new_port()
        self.handlers: dict[str, Any] = {}
        self.host: Host | None = None

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """The same methods come once more, by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    async def start(self) -> None:
        self.host = self.network.listen(self)

    async def stop(self, grace: float | None) -> None:
        if self.host is not None:
            for call in tuple(self.host.calls):
                call.lose("the server stopped")
            self.network.hosts.pop(self.host.address, None)


class SimChannel:
    """Makes calls from one host to another."""

    def __init__(self, network: SimNetwork, source: str, address: str) -> None:
        self._network, self._source, self._address = network, source, address
        self._calls: list[SimCall] = []

    def stream_stream(self, path: str, **_: Any) -> Callable[..., SimCall]:
        return self._caller(path)

    def unary_stream(self, path: str, **_: Any) -> Callable[..., SimCall]:
        return self._caller(path)

    def stream_unary(self, path: str, **_: Any) -> Callable[..., SimCall]:
        return self._caller(path)

    def unary_unary(self, path: str, **_: Any) -> Callable[..., Any]:
        call = self._caller(path)

        async def answer(request: Any, timeout: float | None = None, **_: Any) -> Any:  # noqa: ASYNC109  # as in gRPC
            made = call(request, timeout)
            message = await made.read()
            await made.read()
            return message

        return answer

    async def close(self, grace: float | None = None) -> None:
        for call in tuple(self._calls):
            call.cancel()

    async def __aenter__(self) -> SimChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _caller(self, path: str) -> Callable[..., SimCall]:
        def call(request: Any = None, timeout: float | None = None, **_: Any) -> SimCall:
            made = SimCall(self._network, self._source, self._address, path, request, timeout)
            self._calls.append(made)
            return made

        return call


class _Way:
    """Whether messages pass from one host to another."""

    def __init__(self) -> None:
        self.is_open = True
        self._waiting: list[Callable[[], None]] = []

    def set_open(self, is_open: bool) -> None:
        self.is_open = is_open
        waiting, self._waiting = (self._waiting, []) if is_open else ([], self._waiting)
        for go_on in waiting:
            go_on()

    def when_open(self, go_on: Callable[[], None]) -> None:
        if self.is_open:
            go_on()
        else:
            self._waiting.append(go_on)

    async def wait(self) -> None:
        opened = asyncio.Event()
        self.when_open(opened.set)
        await opened.wait()


class _Pipe:
    """One direction of a call."""

    def __init__(self, network: SimNetwork, source: str, target: str) -> None:
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._way = network.way(source, target)
        self._latency_s = network.latency_s
        self._sent: deque[Any] = deque()
        self._num_due = 0
        self._is_closed = False

    def send(self, item: Any) -> None:
        """A copy of a message arrives; what is no message arrives as it is."""
        if hasattr(item, "SerializeToString"):
            item = type(item).FromString(item.SerializeToString())
        self._sent.append(item)
        asyncio.get_running_loop().call_later(self._latency_s, self._arrive)

    def close(self) -> None:
        """Nothing arrives any more."""
        self._is_closed = True
        self._sent.clear()

    def _arrive(self) -> None:
        self._num_due += 1
        self._way.when_open(self._deliver)

    def _deliver(self) -> None:
        while self._num_due and self._sent and self._way.is_open and not self._is_closed:
            self._num_due -= 1
            self.arrived.put_nowait(self._sent.popleft())


class SimCall:
    """The caller's side of one RPC."""

    def __init__(
        self, network: SimNetwork, source: str, address: str, path: str, request: Any, timeout: float | None
    ) -> None:
        host = network.hosts.get(address)
        target = host.name if host is not None else address
        self._network, self._path, self._address = network, path, address
        self._way = network.way(source, target)
        self._out = _Pipe(network, source, target)
        self._in = _Pipe(network, target, source)
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

    def __init__(self, incoming: _Pipe, outgoing: _Pipe, deadline_s: float | None) -> None:
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
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)
