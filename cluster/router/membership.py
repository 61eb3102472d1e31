"""Which replicas there are: those configured, and those that announce themselves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from cluster.config import RouterConfig, check_address, check_name
from cluster.errors import StaleIncarnation
from cluster.router.link import Link
from cluster.router.places import Places
from cluster.router.quota_share import QuotaShare, next_share
from cluster.router.slowness import Pace, Slowness, compare
from protos import control_pb2, replica_pb2
from worker.errors import InvalidRequest

MAX_REPLICAS = 1024
SILENT_PERIODS = 3
COMPARE_PERIOD_S = 0.5

log = logging.getLogger(__name__)


class LinkFactory(Protocol):
    """Makes the link to a replica; "" as incarnation accepts any process at that address."""

    def __call__(self, address: str, incarnation: str) -> Link:
        """A link that is not started."""


@dataclass(slots=True)
class Member:
    """A replica that announces itself."""

    incarnation: str
    link: Link
    seen_s: float


class Membership:
    """Owns the links. A newer process of a name takes the place of an older one, never the other way round."""

    def __init__(
        self, config: RouterConfig, create_link: LinkFactory, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._create_link = create_link
        self._clock = clock
        self._static: list[Link] = []
        self._members: dict[str, Member] = {}
        self._leaving: list[Link] = []
        self._num_past_trips = 0
        self.places = Places(pause_min_s=config.place_pause_min_s, pause_max_s=config.place_pause_max_s, clock=clock)
        self.quota_share = QuotaShare()
        """Of how many routers this one is, as its replicas say."""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def links(self) -> list[Link]:
        """Every replica once, also when it is both configured and announced."""
        known: set[str] = set()
        links: list[Link] = []
        for link in (*self._static, *(member.link for member in self._members.values()), *self._leaving):
            if link.incarnation and link.incarnation in known:
                continue
            known.add(link.incarnation)
            links.append(link)
        return links

    def has_others(self, link: Link) -> bool:
        """Whether another replica of its model is ready to take over."""
        name = link.model.name if link.model else ""
        return any(one.is_ready and one is not link and one.model and one.model.name == name for one in self.links)

    @property
    def num_trips(self) -> int:
        """How often a breaker of theirs went from closed to open, replicas that are gone included."""
        return self._num_past_trips + sum(link.vitals.breaker.num_trips for link in self.links)

    def is_attached(self, name: str) -> bool:
        """Whether the replica of this name that announced itself last has a stream."""
        member = self._members.get(name)
        return member is not None and member.link.is_attached

    def compare(self) -> None:
        """See which replicas are slower than the others of their model."""
        by_model: dict[str, list[tuple[Slowness, Pace | None]]] = {}
        for link in self.links:
            if link.model:
                by_model.setdefault(link.model.name, []).append((link.vitals.slowness, link.vitals.pace))
        for replicas in by_model.values():
            compare(replicas, self._clock())

    def count_routers(self) -> None:
        """See how many routers there are."""
        num_seen = max((link.num_routers for link in self.links), default=0)
        self.quota_share = next_share(self.quota_share, num_seen, self._clock())

    def tell(self, verdicts: Mapping[bytes, float]) -> None:
        """Let other routers know what they had better refuse."""
        for link in self.links:
            link.tell(verdicts)

    def start(self) -> None:
        """Dial the configured replicas and watch over the announced ones."""
        for address in self._config.replicas:
            link = self._create_link(address, "")
            link.start()
            self._static.append(link)
        self._tasks = [asyncio.create_task(work) for work in (self._sweep_forever(), self._compare_forever())]

    async def stop(self) -> None:
        """Hang up on every replica."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        links = (*self._static, *(member.link for member in self._members.values()), *self._leaving)
        await asyncio.gather(*(link.stop() for link in links))

    def announce(self, request: replica_pb2.AnnounceRequest) -> None:
        """Take an announcement. Raises InvalidRequest, or StaleIncarnation for a process that has a successor."""
        _check(request)
        member = self._members.get(request.replica)
        if member is not None and request.incarnation < member.incarnation:
            raise StaleIncarnation(request.replica, request.incarnation)
        if member is not None and (request.incarnation, request.address) == (member.incarnation, member.link.address):
            member.seen_s = self._clock()
            if not member.link.is_attached:
                member.link.poke()
            return
        if request.state in (control_pb2.REPLICA_STATE_STOPPED, control_pb2.REPLICA_STATE_FAILED):
            return
        self._add(request, member)

    async def sweep(self) -> None:
        """Forget replicas that are gone: lost and silent, or replaced and through with their requests."""
        limit_s = self._clock() - SILENT_PERIODS * self._config.announce_period_s
        for name, member in list(self._members.items()):
            if not member.link.is_attached and member.seen_s < limit_s:
                log.info("replica %s (%s) is forgotten", name, member.incarnation)
                del self._members[name]
                self._num_past_trips += member.link.vitals.breaker.num_trips
                await member.link.stop()
        for link in [link for link in self._leaving if link.num_streams == 0]:
            self._leaving.remove(link)
            self._num_past_trips += link.vitals.breaker.num_trips
            await link.stop()

    def _add(self, request: replica_pb2.AnnounceRequest, predecessor: Member | None) -> None:
        if predecessor is not None:
            predecessor.link.retire()
            self._leaving.append(predecessor.link)
        elif len(self._members) >= MAX_REPLICAS:
            raise InvalidRequest("replica", f"{MAX_REPLICAS} replicas are known, which is the limit")
        link = self._create_link(request.address, request.incarnation)
        link.name = request.replica
        self._members[request.replica] = Member(request.incarnation, link, self._clock())
        link.start()
        log.info("replica %s (%s) announced itself at %s", request.replica, request.incarnation, request.address)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._config.announce_period_s)
            await self.sweep()

    async def _compare_forever(self) -> None:
        while True:
            await asyncio.sleep(COMPARE_PERIOD_S)
            self.compare()
            self.count_routers()


def _check(request: replica_pb2.AnnounceRequest) -> None:
    for field in ("replica", "incarnation"):
        try:
            check_name(field, getattr(request, field))
        except ValueError as error:
            raise InvalidRequest(field, "must be 1 to 128 printable ASCII characters without spaces") from error
    try:
        check_address("address", request.address)
    except ValueError as error:
        raise InvalidRequest("address", "is not host:port") from error
