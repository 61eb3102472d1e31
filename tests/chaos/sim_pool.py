"""A router and its replicas on a virtual clock: their own code, with an engine and a network that can be broken."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from contextvars import copy_context
from typing import Any, TypeVar

import grpc

from cluster.client import Answer
from cluster.client.answers import answer_of
from cluster.client.errors import call_error
from cluster.client.requests import chat_request, generate_request
from cluster.config import ReplicaConfig, RouterConfig
from cluster.replica.events import EventFanout
from cluster.replica.server import ReplicaServer
from cluster.router.server import RouterServer
from protos import generation_pb2_grpc
from tests.chaos.oracle import Question, Record, watch
from tests.chaos.sim_network import HOST, SimNetwork
from tests.fakes.script_engine import ScriptEngine, ScriptKnobs, ScriptText
from worker.faults import InjectedCrash
from worker.request import GenerateRequest

T = TypeVar("T")

RESTART_S = 1.0
ROUTER = "router"
CLIENT = "client"


class VirtualEngine(ScriptEngine):
    """Takes its steps on the event loop."""

    slowness = 1.0

    def _start(self) -> None:
        self.is_running = asyncio.Event()
        self.is_running.set()
        self._work = asyncio.Event()
        self._player = asyncio.create_task(self._play())

    def submit(self, request: GenerateRequest) -> None:
        super().submit(request)
        self._work.set()

    def stop(self) -> None:
        self._is_stopping = True
        self._player.cancel()

    def check(self) -> None:
        if self.is_running.is_set():
            super().check()

    def freeze(self) -> None:
        """The whole process stands still, whoever watches the engine too."""
        self.is_running.clear()

    def thaw(self) -> None:
        if self._busy_since_s is not None:
            self._busy_since_s = asyncio.get_running_loop().time()
        self.is_running.set()

    def _pass_time(self) -> None:
        """It has passed before the step."""

    def _await(self, seen: threading.Event) -> None:
        """Nothing can be waited for on the loop; what is sent first arrives first."""

    async def _play(self) -> None:
        try:
            while True:
                if not (self._rows or self._waiting):
                    self._work.clear()
                    await self._work.wait()
                await self.is_running.wait()
                if not self._wait_for_work():
                    continue
                began_s = self._busy_since_s = asyncio.get_running_loop().time()
                await asyncio.sleep(self.knobs.step_s * self.slowness)
                await self.is_running.wait()
                while self._is_hanging:  # noqa: ASYNC110  # a knob has no event
                    await asyncio.sleep(0.05)
                self._step()
                self._step_s += 0.2 * (asyncio.get_running_loop().time() - began_s - self._step_s)
        except InjectedCrash as error:
            self._death = error
            self._end()


class SimReplica:
    """One place, and the process that is in it at the moment."""

    def __init__(self, pool: SimPool, name: str) -> None:
        self.name = name
        self._pool = pool
        self._context = copy_context()
        self._restart: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """A new process."""
        await _within(self._context, self._start)

    async def _start(self) -> None:
        HOST.set(self.name)
        config = ReplicaConfig(name=self.name, routers=(self._pool.router.address,), reflection=False)
        events = EventFanout()
        self.engine = VirtualEngine(
            events, ScriptKnobs(step_s=self._pool.step_s, max_rows=self._pool.max_rows, stall_s=2.0)
        )
        self.server = ReplicaServer(
            config,
            self.engine,
            ScriptText(),
            events=events,
            on_failure=lambda _: self.kill(),
            faults=self.engine.faults,
        )
        await self.server.start()

    def kill(self, restart_s: float | None = RESTART_S) -> None:
        """SIGKILL; the place is empty until a new process has started."""
        host = self._pool.network.hosts.pop(self.server.address, None)
        if host is None:
            return
        host.die()
        self.engine.stop()
        # What a process leaves behind is nothing: its announcements end here, and its timers find no stream.
        self._pool.buried.append(self.server)
        self.server.announce_to(())
        self.thaw()
        if restart_s is not None:
            self._restart = asyncio.create_task(self._start_later(restart_s))

    async def _start_later(self, restart_s: float) -> None:
        await asyncio.sleep(restart_s)
        await self.start()

    def freeze(self) -> None:
        """SIGSTOP: nothing leaves, nothing is read, no step is run."""
        self.engine.freeze()
        self.cut()

    def thaw(self) -> None:
        """SIGCONT: all that was kept up goes its way."""
        self.engine.thaw()
        self.mend()

    def cut(self, *, inward: bool = True, outward: bool = True) -> None:
        """The ways between this replica and the router are blocked."""
        if inward:
            self._pool.network.block(ROUTER, self.name)
        if outward:
            self._pool.network.block(self.name, ROUTER)

    def mend(self) -> None:
        self._pool.network.open(ROUTER, self.name)
        self._pool.network.open(self.name, ROUTER)

    async def drain(self, grace_s: float) -> None:
        """A rolling update of this place: drained, ended, started anew."""
        server = self.server
        await server.drain(grace_s)
        if server is self.server:
            self.kill()


class SimStream:
    """The pieces of one answer, as a client that tries once sees them."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __aiter__(self) -> AsyncIterator[Answer]:
        return self

    async def __anext__(self) -> Answer:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise call_error(error) from error
        if response is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise StopAsyncIteration
        return answer_of(response)

    def cancel(self) -> None:
        """Leave."""
        self._call.cancel()


class SimPool:
    """The router and its replicas."""

    def __init__(self, num_replicas: int, *, router: RouterConfig, step_s: float, max_rows: int) -> None:
        self.network = SimNetwork()
        self.step_s = step_s
        self.max_rows = max_rows
        self.buried: list[ReplicaServer] = []
        self.router = RouterServer(router)
        self.replicas = [SimReplica(self, f"r{number}") for number in range(num_replicas)]

    async def start(self) -> None:
        await _within(copy_context(), self._start_router)
        for replica in self.replicas:
            await replica.start()
        await self.router.wait_ready(len(self.replicas), timeout_s=60)

    async def _start_router(self) -> None:
        HOST.set(ROUTER)
        await self.router.start()

    async def ask(self, question: Question, *, request_id: str, timeout_s: float | None = None) -> Record:
        """One streamed answer, checked."""
        return await watch(question, self.stream(question, request_id=request_id, timeout_s=timeout_s))

    def stream(self, question: Question, *, request_id: str, timeout_s: float | None = None) -> SimStream:
        """The pieces of an answer."""
        channel: Any = self.network.channel(CLIENT, self.router.address)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        named: Any = {"model": "", "request_id": request_id, "sampling": question.sampling()}
        if question.is_chat:
            return SimStream(stub.ChatStream(chat_request([("user", question.text)], **named), timeout=timeout_s))
        request = generate_request(question.text or question.prompt, **named)
        return SimStream(stub.GenerateStream(request, timeout=timeout_s))


@contextlib.asynccontextmanager
async def sim_pool(
    num_replicas: int, *, router: RouterConfig | None = None, step_s: float = 0.02, max_rows: int = 16
) -> AsyncIterator[SimPool]:
    """A pool whose replicas are ready; use it on a virtual loop."""
    config = router or RouterConfig(listen="127.0.0.1:0", reflection=False, wait_for_replica_s=10.0)
    pool = SimPool(num_replicas, router=config, step_s=step_s, max_rows=max_rows)
    with pool.network.installed():
        await pool.start()
        yield pool


async def _within(context: object, work: Callable[[], object]) -> None:
    await asyncio.create_task(work(), context=context)  # type: ignore[arg-type]
