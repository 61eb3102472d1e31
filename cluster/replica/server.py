"""A replica: one engine behind a gRPC port."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import grpc
from prometheus_client.core import Metric

from cluster import control, generation, health
from cluster.answers import READINESS, model_to_proto
from cluster.codec import NO_DEFAULTS
from cluster.config import LINK_MESSAGE_BYTES, ReplicaConfig, join_address, split_address
from cluster.control import ControlServicer
from cluster.generation import GenerationServicer
from cluster.health import Health
from cluster.metrics.exporter import MetricsExporter
from cluster.metrics.place import place_families
from cluster.metrics.rpcs import RpcCounter
from cluster.replica import attach
from cluster.replica.announcer import Announcer
from cluster.replica.attach import AttachServicer
from cluster.replica.engine_backend import EngineBackend
from cluster.replica.events import EventFanout
from cluster.replica.faults import add_faults
from cluster.replica.flush import FlushPolicy
from cluster.replica.lifecycle import Lifecycle, State
from cluster.replica.routed import Routed
from cluster.replica.router_list import RouterList
from cluster.replica.start_times import StartTimes
from cluster.replica.text import TextProcessor, Texts
from cluster.security.guard import Authenticate, Guard
from cluster.security.tenancy import Tenancy
from cluster.transport import bind, create_server, offer_reflection
from cluster.version import version
from cluster.waiting import happens_within
from protos import control_pb2, control_pb2_grpc, generation_pb2_grpc, replica_pb2, replica_pb2_grpc
from worker.errors import Draining, WorkerError
from worker.faults import Faults
from worker.service import EngineService

log = logging.getLogger(__name__)

STOP_GRACE_S = 0.5
HEARD_WITHIN_S = 1.0
"""A router that has not answered the first announcement by then is not waited for."""


class ReplicaServer:
    """Serves one engine to routers and to direct clients.

    `events` is the sink the engine was made with. `on_failure` is called on the event loop once the engine is dead or
    stalled and its clients have been told: the process should then exit non-zero. The server does not stop the engine.
    `faults` are those the engine was made with; they are offered only if the config says so. `flush` takes the place of
    the configured pace of messages, for an engine that keeps it itself. `gpu` is the UUID of the one it computes on.
    """

    def __init__(
        self,
        config: ReplicaConfig,
        engine: EngineService,
        text: TextProcessor | None = None,
        *,
        events: EventFanout,
        generation_defaults: Mapping[str, Any] = NO_DEFAULTS,
        on_failure: Callable[[WorkerError], None] | None = None,
        faults: Faults | None = None,
        flush: FlushPolicy | None = None,
        times: StartTimes | None = None,
        gpu: str = "",
    ) -> None:
        self._config = config
        self._engine = engine
        self._events = events
        self._on_failure = on_failure
        self._faults = faults
        self._times = times or StartTimes()
        self._gpu = gpu
        self._started_s = time.monotonic()
        self._incarnation = create_incarnation()
        self._lifecycle = Lifecycle()
        self._texts = Texts(text, engine.info, inline_bytes=config.inline_text_bytes, timeout_s=config.text_timeout_s)
        self._backend = EngineBackend(
            engine,
            self._texts,
            lifecycle=self._lifecycle,
            flush=flush or FlushPolicy.of(config),
            generation_defaults=generation_defaults,
            server_info=self._server_info,
        )
        self._routers = RouterList(config.routers)
        self._routed = Routed(() if not self._routers.is_fixed else config.routers)
        self._attach = AttachServicer(self._backend, config, self._hello, on_answered=self._routed.note_answered)
        self._guard = Guard(config.security)
        self._tenancy = Tenancy(self._guard)
        self._generation = GenerationServicer(self._backend, max_streams=config.max_streams, tenancy=self._tenancy)
        self._health = Health()
        self._rpcs = RpcCounter(generation.SERVICE)
        self._exporter = MetricsExporter(
            config.metrics_listen, self._metrics, self._guard, is_serving=lambda: self._health.is_serving
        )
        self._announcer = Announcer(
            self._announcement,
            period_s=config.announce_period_s,
            keepalive=config.keepalive,
            security=config.security,
            on_taken=self._note_taken,
        )
        self._server: grpc.aio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None
        self._is_listed = asyncio.Event()
        self._over = asyncio.Event()

    @property
    def address(self) -> str:
        """host:port that routers and clients dial; known once started."""
        return self._backend.address

    @property
    def name(self) -> str:
        """Stable over restarts if it was configured, else the address."""
        return self._backend.name

    @property
    def incarnation(self) -> str:
        """New with each process; a later one sorts after an earlier one."""
        return self._incarnation

    @property
    def state(self) -> State:
        """Where the replica stands."""
        return self._lifecycle.state

    @property
    def metrics_address(self) -> str:
        """host:port of the metrics; "" when they are off."""
        return self._exporter.address

    @property
    def num_live(self) -> int:
        """Requests being answered now, for routers and for direct clients."""
        return self._backend.num_live

    async def start(self) -> None:
        """Listen, announce this replica, and become READY once the routers have said what they refuse."""
        self._backend.connect(self._events)
        self._backend.on_engine_dead = lambda error: self._fail(error)
        # Made here: gRPC binds it to the running event loop.
        server = self._server = create_server(
            keepalive=self._config.keepalive,
            max_streams=self._config.max_streams,
            message_bytes=LINK_MESSAGE_BYTES,
            watchers=(Authenticate(self._guard), self._rpcs),
        )
        await self._add_services(server)
        port = bind(server, self._config.listen, self._guard.server_credentials())
        self._exporter.start()
        host = self._config.advertise or split_address("listen", self._config.listen)[0]
        self._backend.address = join_address(host, port)
        self._backend.name = self._config.name or self._backend.address
        await server.start()
        self._lifecycle.subscribe(self._state_changed)
        self._follow(self._routers)
        await happens_within(self._is_listed, HEARD_WITHIN_S)
        await self._announcer.wait_tried(HEARD_WITHIN_S)
        self._lifecycle.advance(State.READY)
        self._spawn(self._watch_engine())
        self._times.over("listening")
        log.info("replica %s (%s) serves %s at %s", self.name, self.incarnation, self._engine.info.model, self.address)

    def announce_to(self, routers: Sequence[str]) -> None:
        """Announce to these routers instead of those so far; see ReplicaConfig.routers.

        Routers that are no longer among them find this replica draining: what they run here is finished, and nothing
        new is taken from them. Raises OSError or ValueError for a file that cannot be used.
        """
        self._follow(RouterList(routers))

    async def wait_routed(self, timeout_s: float) -> bool:
        """Wait until each router that takes announcements has had an answer, and one at least; False if not in time.

        The answer is the canary's at first. Routers that are away are not waited for; see cluster.replica.routed.
        """
        if not await self._routed.wait(timeout_s):
            missing = ", ".join(self._routed.missing) or "none is configured"
            log.warning(
                "replica %s: after %.0f s there are routers without an answer: %s", self.name, timeout_s, missing
            )
            return False
        self._times.over("routed")
        return True

    def check(self) -> None:
        """Raise EngineDead or EngineStalled if the engine makes no progress although it has work."""
        self._engine.check()

    async def drain(self, grace_s: float = 30.0) -> None:
        """Take nothing new and finish what is running, for at most `grace_s`; then the replica is STOPPED."""
        await self._backend.drain("", grace_s=grace_s)

    async def stop(self) -> None:
        """End at once: what is still running ends UNAVAILABLE."""
        self._lifecycle.advance(State.STOPPED)
        self._backend.fail_all(Draining())
        await self._backend.wait_idle(STOP_GRACE_S)
        self._attach.hang_up()
        if self._following is not None:
            self._following.cancel()
        await self._announcer.stop()
        await self._health.stop()
        await self._exporter.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        self._texts.close()

    async def wait_stopped(self) -> None:
        """Return once the replica is STOPPED or FAILED: a drain may have been asked for over the control service."""
        await self._over.wait()

    async def _add_services(self, server: grpc.aio.Server) -> None:
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(self._attach, server)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._generation, server)
        control_pb2_grpc.add_ControlServiceServicer_to_server(ControlServicer(self._backend, self._tenancy), server)
        add_faults(server, self._config, self._faults)
        await self._health.start(server)
        if self._config.reflection:
            services = (attach.SERVICE, generation.SERVICE, control.SERVICE, health.SERVICE)
            offer_reflection(server, self._config.listen, services, is_guarded=self._config.security.asks_who)

    async def _watch_engine(self) -> None:
        period_s = self._config.load_period_s
        while True:
            started_s = time.monotonic()
            await asyncio.sleep(period_s)
            # After the whole process was held up, the engine needs a moment too before its silence means anything.
            if time.monotonic() - started_s > 2 * period_s:
                continue
            try:
                self._engine.check()
            except WorkerError as error:
                self._fail(error)
                return
            self._publish_health()

    def _fail(self, error: WorkerError) -> None:
        """The engine is gone for good: tell everyone, then the host."""
        self._backend.failure = self._backend.failure or error
        if self._lifecycle.advance(State.FAILED):
            log.error("the engine failed: %s", type(error).__name__)
            self._backend.fail_all(error)
            self._spawn(self._report_failure(error))

    async def _report_failure(self, error: WorkerError) -> None:
        await self._backend.wait_idle(1.0)
        # Frames that were packed are now with gRPC; give its own thread time to put them on the wire.
        await asyncio.sleep(0.1)
        if self._on_failure is not None:
            self._on_failure(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _follow(self, routers: RouterList) -> None:
        """Announce to these, and to those that they become."""
        if self._following is not None:
            self._following.cancel()
        self._following = self._spawn(self._follow_on(routers))

    async def _follow_on(self, routers: RouterList) -> None:
        async for addresses in routers.changes():
            left = self._routed.announce_to(addresses)
            self._announcer.announce_to(addresses)
            self._is_listed.set()
            if left:
                self._spawn(self._leave(left))

    async def _leave(self, routers: set[str]) -> None:
        await self._routed.wait_heard()  # one of them may only have another address now
        self._attach.routers.dismiss(routers - self._routed.names)

    def _note_taken(self, address: str, response: replica_pb2.AnnounceResponse) -> None:
        self._routed.note_taken(address, response.router)
        if response.router in self._routed.names:
            self._attach.routers.readmit(response.router)
        for verdict in response.poisons:
            self._attach.routers.note_verdict(None, verdict.fingerprint, verdict.ttl_s)

    def _state_changed(self) -> None:
        if self._lifecycle.state in (State.STOPPED, State.FAILED):
            self._over.set()
        self._publish_health()
        self._announcer.announce_change()

    def _publish_health(self) -> None:
        self._health.set(
            is_serving=self._lifecycle.state is State.READY, readiness=READINESS[self._engine.load().readiness]
        )

    def _metrics(self) -> Iterator[Metric]:
        yield from self._backend.metrics.families(self._engine.load())
        yield self._rpcs.family()
        yield from place_families(self._hello(), self._times)

    def _hello(self) -> replica_pb2.ReplicaHello:
        return replica_pb2.ReplicaHello(
            replica=self.name, incarnation=self.incarnation, model=model_to_proto(self._engine.info), gpu=self._gpu
        )

    def _announcement(self) -> replica_pb2.AnnounceRequest:
        return replica_pb2.AnnounceRequest(
            replica=self.name, address=self.address, incarnation=self.incarnation, state=self._lifecycle.state.value
        )

    def _server_info(self) -> control_pb2.ServerInfo:
        return control_pb2.ServerInfo(
            role="replica",
            version=version(),
            id=self.incarnation,
            uptime_s=time.monotonic() - self._started_s,
            model=self._engine.info.model,
        )


def create_incarnation() -> str:
    """Sorts by the time it was made; the tail tells apart processes of the same millisecond."""
    return f"{time.time_ns() // 1_000_000:012x}-{secrets.token_hex(4)}"
