"""A router: the pool behind a gRPC port."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator
from typing import Any

import grpc
from prometheus_client.core import Metric

from cluster import control, generation, health
from cluster.config import MESSAGE_BYTES, RouterConfig, join_address, split_address
from cluster.control import ControlServicer
from cluster.generation import GenerationServicer
from cluster.health import Health
from cluster.load_values import pool_values
from cluster.metrics.exporter import MetricsExporter
from cluster.metrics.router import RouterMetrics
from cluster.metrics.rpcs import RpcCounter
from cluster.router import announce
from cluster.router.announce import MembershipServicer
from cluster.router.canary import run_canary
from cluster.router.capacity import num_rows
from cluster.router.fair_queue import FairGate
from cluster.router.link import Link
from cluster.router.membership import Membership
from cluster.router.policies import POLICIES, Policy
from cluster.router.pool import Pool
from cluster.router.quarantine import Quarantine
from cluster.security.guard import Authenticate, Guard
from cluster.security.tenancy import Tenancy
from cluster.transport import ConnectionAge, bind, create_server, offer_reflection
from cluster.version import version
from protos import control_pb2, control_pb2_grpc, generation_pb2_grpc, replica_pb2_grpc
from worker.errors import Draining

log = logging.getLogger(__name__)

STOP_GRACE_S = 0.5


class RouterServer:
    """Serves clients from whatever replicas are configured or announce themselves.

    Raises OSError or ValueError for files of certificates and tokens that cannot be used.
    """

    def __init__(self, config: RouterConfig, *, policy: Policy | None = None) -> None:
        self._config = config
        self._started_s = time.monotonic()
        self.name = config.name or f"router-{secrets.token_hex(4)}"
        """Tells routers apart for replicas and in ControlService."""
        self._health = Health()
        self._metrics = RouterMetrics()
        self._rpcs = RpcCounter(generation.SERVICE)
        self._guard = Guard(config.security)
        self._gate = FairGate(self._num_rows, check_wait=self._check_wait)
        self._tenancy = Tenancy(self._guard, self._gate, num_sharing=self._num_sharing)
        self._exporter = MetricsExporter(
            config.metrics_listen,
            self._collect,
            self._guard,
            page=self._page,
            is_serving=lambda: self._health.is_serving,
        )
        self._membership = Membership(config, self._create_link)
        self._quarantine = Quarantine(
            config.quarantine_s, secret=lambda: self._guard.pool_token, on_verdict=self._membership.tell
        )
        self._pool = Pool(
            config,
            self._membership,
            policy or POLICIES[config.policy](config.affinity_bound),
            server_info=self._server_info,
            on_change=self._readiness_changed,
            metrics=self._metrics,
            quarantine=self._quarantine,
        )
        self._generation = GenerationServicer(
            self._pool, max_streams=config.max_streams, tenancy=self._tenancy, reader_timeout_s=config.reader_timeout_s
        )
        self._server: grpc.aio.Server | None = None
        self._address = ""

    @property
    def address(self) -> str:
        """host:port clients dial; known once started."""
        return self._address

    @property
    def metrics_address(self) -> str:
        """host:port of the metrics; "" when they are off."""
        return self._exporter.address

    @property
    def pool(self) -> Pool:
        """The backend: for programs that host a router in their own process."""
        return self._pool

    async def start(self) -> None:
        """Listen, and dial the configured replicas."""
        # Made here: gRPC binds it to the running event loop.
        server = self._server = create_server(
            keepalive=self._config.keepalive,
            max_streams=self._config.max_streams,
            message_bytes=MESSAGE_BYTES,
            watchers=(Authenticate(self._guard), self._rpcs),
            age=ConnectionAge(self._config.max_connection_age_s, self._config.connection_grace_s),
        )
        await self._add_services(server)
        port = bind(server, self._config.listen, self._guard.server_credentials())
        self._exporter.start()
        self._address = join_address(split_address("listen", self._config.listen)[0], port)
        await server.start()
        self._membership.start()
        log.info("router %s listens at %s", self.name, self.address)

    async def drain(self, grace_s: float = 30.0) -> None:
        """Take nothing new and finish what is running, for at most `grace_s`."""
        await self._pool.drain("", grace_s=grace_s)

    async def stop(self) -> None:
        """End at once: what is still running ends UNAVAILABLE."""
        self._pool.fail_all(Draining())
        await self._pool.wait_idle(STOP_GRACE_S)
        await self._health.stop()
        await self._exporter.stop()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        await self._membership.stop()

    async def wait_ready(self, num_replicas: int = 1, *, timeout_s: float) -> None:
        """Wait until so many replicas are ready. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while sum(link.is_ready for link in self._membership.links) < num_replicas:
                await self._pool.wait_changed()

    async def _add_services(self, server: grpc.aio.Server) -> None:
        membership = MembershipServicer(
            self._membership,
            router=self.name,
            period_s=self._config.announce_period_s,
            verdicts=lambda: self._quarantine.verdicts,
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._generation, server)
        control_pb2_grpc.add_ControlServiceServicer_to_server(ControlServicer(self._pool, self._tenancy), server)
        replica_pb2_grpc.add_MembershipServiceServicer_to_server(membership, server)
        await self._health.start(server)
        if self._config.reflection:
            services = (generation.SERVICE, control.SERVICE, announce.SERVICE, health.SERVICE)
            offer_reflection(server, self._config.listen, services, is_guarded=self._config.security.asks_who)

    def _create_link(self, address: str, incarnation: str) -> Link:
        return Link(
            address,
            self._config,
            router=self.name,
            probe=self._probe,
            on_change=self._pool.links_changed,
            on_fenced=self._metrics.fenced,
            incarnation=incarnation,
            has_others=self._membership.has_others,
            quarantine=self._quarantine,
            places=self._membership.places,
        )

    async def _probe(self, link: Link) -> None:
        await run_canary(link, timeout_s=self._config.canary_timeout_s)

    def _num_sharing(self) -> int:
        return self._membership.quota_share.num_routers if self._config.split_quotas else 1

    def _num_rows(self) -> int:
        return num_rows(link.load for link in self._membership.links if link.is_ready)

    def _check_wait(self, num_ahead: int, rows: int, timeout_s: float | None) -> None:
        self._pool.check_wait(num_ahead, num_sequences=rows, timeout_s=timeout_s)

    def _readiness_changed(self) -> None:
        self._gate.look_again()
        self._health.set(is_serving=self._pool.has_ready, readiness=self._pool.readiness)

    def _collect(self) -> Iterator[Metric]:
        yield from self._metrics.families(
            self._pool.loads(),
            self._pool.num_live,
            num_trips=self._membership.num_trips,
            refusals=self._pool.refusals,
            failing=self._membership.places.failing,
        )
        yield self._rpcs.family()
        yield from self._tenancy.families()

    def _page(self) -> dict[str, Any]:
        return pool_values(self._server_info(), self._pool.loads())

    def _server_info(self) -> control_pb2.ServerInfo:
        models = [link.model.name for link in self._membership.links if link.model]
        return control_pb2.ServerInfo(
            role="router",
            version=version(),
            id=self.name,
            uptime_s=time.monotonic() - self._started_s,
            model=models[0] if models else "",
        )
