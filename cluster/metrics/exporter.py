"""The HTTP port that Prometheus asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.config import join_address, split_address
from cluster.security.guard import Guard
from cluster.security.http import GuardedHttp

COLLECT_TIMEOUT_S = 5.0

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
        return list(self._source())


class MetricsExporter:
    """Answers HTTP at one port with the metrics of one server object, from a registry of its own.

    With a `guard` that asks who calls, for its monitors and operators alone, and over TLS if it has certificates.
    """

    def __init__(self, listen: str, source: Source, guard: Guard | None = None) -> None:
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
        registry.register(LoopCollector(asyncio.get_running_loop(), self._source))
        host, port = split_address("metrics_listen", self._listen)
        try:
            self._http = GuardedHttp(host, port, make_wsgi_app(registry), self._guard)
        except OSError as error:
            raise OSError(error.errno, f"cannot listen at {self._listen} for metrics: {error.strerror}") from error

    async def stop(self) -> None:
        """Hang up."""
        if self._http is not None:
            await asyncio.to_thread(self._http.stop)
            self._http = None
