"""Keeps routers informed that this replica exists."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import grpc

from cluster.config import Keepalive
from cluster.security.config import ROUTER_NAME, SecurityConfig
from cluster.security.identity import identity_of
from cluster.transport import open_link_channel
from protos import replica_pb2, replica_pb2_grpc

MIN_PERIOD_S = 0.05
MAX_PERIOD_S = 60.0

log = logging.getLogger(__name__)


class Announcer:
    """Announces to each router at once, after every change, and at the pace the router asks for.

    It dials again when the certificate it shows has been renewed.
    """

    def __init__(
        self,
        announcement: Callable[[], replica_pb2.AnnounceRequest],
        *,
        period_s: float,
        keepalive: Keepalive,
        security: SecurityConfig | None = None,
        on_taken: Callable[[str, replica_pb2.AnnounceResponse], None] = lambda _address, _response: None,
    ) -> None:
        """`on_taken` is told the address of a router that has taken an announcement, and what it said."""
        self._announcement = announcement
        self._period_s = period_s
        self._keepalive = keepalive
        self._security = security or SecurityConfig()
        self._on_taken = on_taken
        self._problem = ""
        """Why the latest announcement was not taken."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changes: dict[str, asyncio.Event] = {}
        self._tried: dict[str, asyncio.Event] = {}

    def announce_to(self, routers: Sequence[str]) -> None:
        """Announce to these routers from now on, and to no others."""
        for address in self._tasks.keys() - set(routers):
            self._tasks.pop(address).cancel()
            del self._changes[address], self._tried[address]
        for address in routers:
            if address not in self._tasks:
                self._changes[address], self._tried[address] = asyncio.Event(), asyncio.Event()
                self._tasks[address] = asyncio.create_task(
                    self._run(address, self._changes[address], self._tried[address])
                )

    async def wait_tried(self, timeout_s: float) -> None:
        """Wait until each router has taken an announcement or was found not to, for at most that long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for tried in tuple(self._tried.values()):
                    await tried.wait()

    def announce_change(self) -> None:
        """Something routers should know at once has changed."""
        for change in self._changes.values():
            change.set()

    async def stop(self) -> None:
        """End, without a farewell."""
        tasks = list(self._tasks.values())
        self.announce_to(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, address: str, change: asyncio.Event, tried: asyncio.Event) -> None:
        identity = identity_of(self._security)
        was_heard = True
        while True:
            shown = identity.num_changes
            async with open_link_channel(address, self._keepalive, self._security, peer=ROUTER_NAME) as channel:
                stub = replica_pb2_grpc.MembershipServiceStub(channel)
                while shown == identity.num_changes:
                    change.clear()
                    period_s = await self._announce(address, stub)
                    tried.set()
                    if (period_s is not None) != was_heard:
                        was_heard = period_s is not None
                        self._log_heard(address, was_heard)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(period_s or self._period_s):
                            await change.wait()

    async def _announce(self, address: str, stub: replica_pb2_grpc.MembershipServiceAsyncStub) -> float | None:
        """The pace the router asks for; None if it did not take the announcement."""
        try:
            response = await stub.Announce(self._announcement(), timeout=max(1.0, self._period_s))
        except grpc.aio.AioRpcError as error:
            self._problem = f"{error.code().name}: {error.details()}"
            return None
        self._on_taken(address, response)
        return min(max(response.next_s or self._period_s, MIN_PERIOD_S), MAX_PERIOD_S)

    def _log_heard(self, address: str, was_heard: bool) -> None:
        if was_heard:
            log.info("router %s takes announcements", address)
        else:
            log.warning("router %s does not take announcements (%s)", address, self._problem)
