"""gRPC without sockets, on one event loop: real stubs call real servicers over links that can be broken.

A message takes `latency_s`; one that is sent while its way is blocked arrives, in order, once it is
open again, as TCP would have it, unless the connection is given up before.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.chaos.sim_call import SimCall
from tests.chaos.sim_way import Way

SERVED_BY = ("cluster.replica.server", "cluster.router.server")
DIALED_BY = ("cluster.router.connection", "cluster.replica.announcer")


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
        self._ways: dict[tuple[str, str], Way] = {}

    def way(self, source: str, target: str) -> Way:
        """Between two hosts, by their names."""
        return self._ways.setdefault((source, target), Way())

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
