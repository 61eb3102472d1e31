"""The HTTP port that Prometheus asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.config import join_address, split_address
from cluster.metrics.families import plain_gauge
from cluster.page.routes import with_routes
from cluster.security.guard import Guard
from cluster.security.http import GuardedHttp

COLLECT_TIMEOUT_S = 5.0

T = TypeVar("T")
Source = Callable[[], Iterable[Metric]]


class LoopCollector(Collector):
    """Collects on the event loop that counts, so that a reading is consistent and nothing needs a lock."""

    def __init__(self, loop: asyncio.AbstractEventLoop, source: Source) -> None:
        self._loop = loop
        self._source = source

    def collect(self) -> Iterable[Metric]:
        """On any thread but the loop's. Raises TimeoutError when the loop is stuck."""
        return asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(COLLECT_TIMEOUT_S)

    async def _read(self) -> list[Metric]:
        return [*self._source(), loop_family()]


def loop_family() -> Metric:
    """Of the running event loop, whatever it serves."""
    return plain_gauge("event_loop_tasks", "Tasks on the event loop that serves.", len(asyncio.all_tasks()))


def _read_on(loop: asyncio.AbstractEventLoop, values: Callable[[], T]) -> T:
    """What only the event loop may read, on another thread. Raises TimeoutError when the loop is stuck."""

    async def read() -> T:
        return values()

    return asyncio.run_coroutine_threadsafe(read(), loop).result(COLLECT_TIMEOUT_S)


class MetricsExporter:
    """Answers HTTP at one port with the metrics of one server object, from a registry of its own.

    With `page` there is also a live page for browsers, with `is_serving` /healthz for probes; both are read on the event
    loop too. With a `guard` that asks who calls, for its monitors and operators alone, and over TLS if it has certificates.
    """

    def __init__(
        self,
        listen: str,
        source: Source,
        guard: Guard | None = None,
        *,
        page: Callable[[], Mapping[str, Any]] | None = None,
        is_serving: Callable[[], bool] | None = None,
    ) -> None:
        self._page = page
        self._is_serving = is_serving
        self._listen = listen
        self._source = source
        self._guard = guard
        self._http: GuardedHttp | None = None

    @property
    def address(self) -> str:
        """host:port; "" when it is off."""
        if self._http is None:
            return ""
        return join_address(split_address("metrics_listen", self._listen)[0], self._http.port)

    def start(self) -> None:
        """Listen, unless the address is empty; call on the event loop that counts. Raises OSError for a taken port."""
        if not self._listen:
            return
        registry = CollectorRegistry()
        loop = asyncio.get_running_loop()
        registry.register(LoopCollector(loop, self._source))
        app = make_wsgi_app(registry)
        page, health = self._page, self._is_serving
        app = with_routes(
            app,
            is_serving=None if health is None else partial(_read_on, loop, health),
            values=None if page is None else partial(_read_on, loop, page),
        )
        host, port = split_address("metrics_listen", self._listen)
        try:
            self._http = GuardedHttp(host, port, app, self._guard)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen at {self._listen} for metrics: {error.strerror}") from error

    async def stop(self) -> None:
        """Hang up."""
        if self._http is not None:
            await asyncio.to_thread(self._http.stop)
            self._http = None
