"""Asks routers for their loads, on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Sequence

import grpc

from cluster.config import Keepalive
from cluster.security.config import ROUTER_NAME, SecurityConfig
from cluster.transport import open_link_channel
from protos import control_pb2, control_pb2_grpc

CALL_TIMEOUT_S = 2.0
STALE_S = 5.0
"""A report that is older says nothing of now."""

log = logging.getLogger(__name__)


class RouterWatch:
    """The newest report of each router. Whoever reads it never waits: the thread does, for as long as there is a reader.

    Nobody tells a policy of Serve that another has taken its place, so the thread ends once this object is gone.
    """

    def __init__(
        self,
        routers: Sequence[str],
        *,
        period_s: float,
        keepalive: Keepalive | None = None,
        security: SecurityConfig | None = None,
    ) -> None:
        self._period_s = period_s
        calls = _Calls(tuple(routers), period_s, keepalive or Keepalive(), security)
        self._reports = calls.reports
        weakref.finalize(self, calls.is_over.set)
        self.thread = threading.Thread(target=lambda: asyncio.run(calls.run()), name="router-watch", daemon=True)
        self.thread.start()

    @property
    def reports(self) -> list[control_pb2.GetLoadsResponse]:
        """Of routers that have answered lately; empty when none has, which says nothing about demand."""
        limit_s = time.monotonic() - max(STALE_S, 3 * self._period_s)
        return [report for when_s, report in list(self._reports.values()) if when_s >= limit_s]


class _Calls:
    """What the thread does. It knows nothing of the watch."""

    def __init__(
        self, routers: tuple[str, ...], period_s: float, keepalive: Keepalive, security: SecurityConfig | None
    ) -> None:
        self.reports: dict[str, tuple[float, control_pb2.GetLoadsResponse]] = {}
        self.is_over = threading.Event()
        self._routers = routers
        self._period_s = period_s
        self._keepalive = keepalive
        self._security = security

    async def run(self) -> None:
        await asyncio.gather(*(self._watch(router) for router in self._routers))

    async def _watch(self, router: str) -> None:
        async with open_link_channel(router, self._keepalive, self._security, peer=ROUTER_NAME) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            while not self.is_over.is_set():
                try:
                    report = await stub.GetLoads(control_pb2.GetLoadsRequest(), timeout=CALL_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    log.debug("router %s does not report: %s", router, error.code())
                else:
                    self.reports[router] = (time.monotonic(), report)
                await asyncio.sleep(self._period_s)
