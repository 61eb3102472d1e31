"""A Backend over many replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import grpc

from cluster.codec import AnyRequest
from cluster.config import RouterConfig
from cluster.criticality import current_criticality
from cluster.delivered import Delivered
from cluster.errors import RemoteError, ReplicaLost, UnknownReplica
from cluster.metrics.router import RouterMetrics
from cluster.router.admission import Admission, together
from cluster.router.answering import Answering
from cluster.router.link import Link
from cluster.router.membership import Membership
from cluster.router.placement import Placement
from cluster.router.policies import Policy
from cluster.router.quarantine import Quarantine
from cluster.router.resuming import Resuming
from cluster.router.vitals import BREAKERS
from cluster.tracing import RequestTrace
from cluster.waiting import happens_within
from protos import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc
from worker.errors import DeadlineExceeded, Draining, RequestAborted
from worker.request import Criticality

UNAVAILABLE: int = grpc.StatusCode.UNAVAILABLE.value[0]
CUT_OFF_S = 1.0
"""After a drain's grace: for the errors of what was cut off to reach their clients."""

T = TypeVar("T")


class Pool:
    """Answers each request from one replica, or from several after one another, and speaks for all of them."""

    def __init__(
        self,
        config: RouterConfig,
        membership: Membership,
        policy: Policy,
        *,
        server_info: Callable[[], control_pb2.ServerInfo],
        on_change: Callable[[], None],
        metrics: RouterMetrics,
        quarantine: Quarantine,
    ) -> None:
        self._config = config
        self._membership = membership
        self._placement = Placement(config, membership, policy)
        self._quarantine = quarantine
        self._admission = Admission(config)
        self._resuming = Resuming(
            config, self._placement, quarantine=quarantine, metrics=metrics, on_explained=membership.places.excuse
        )
        self._server_info = server_info
        self._on_change = on_change
        self._answering: dict[str, Answering] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    @property
    def has_ready(self) -> bool:
        """Whether at least one replica takes requests and the router does."""
        return not self._is_draining and any(link.is_ready for link in self._membership.links)

    @property
    def readiness(self) -> control_pb2.GraphReadiness.ValueType:
        """The most that any replica that takes requests runs from graphs."""
        ready = [link.load.readiness for link in self._membership.links if link.is_ready]
        return max(ready, default=control_pb2.GRAPH_READINESS_UNSPECIFIED)

    @property
    def refusals(self) -> Mapping[tuple[str, Criticality], int]:
        """Requests that were not taken on, by reason and class."""
        return self._admission.refusals

    @property
    def num_live(self) -> int:
        """Requests being answered now."""
        return len(self._answering)

    def links_changed(self) -> None:
        """Some replica became ready or ceased to be: those who wait for one look again."""
        self._placement.note_change()
        self._on_change()

    async def wait_changed(self) -> None:
        """Return after the next change."""
        await self._placement.wait_changed()

    async def generate(
        self, request: AnyRequest, *, timeout_s: float | None, delivered: Delivered | None = None
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """See Backend."""
        if self._is_draining:
            raise Draining
        self._quarantine.check(request)
        if delivered is None or not delivered.next_sequence:  # what was begun elsewhere was taken on there
            self._admit(request, timeout_s)
        trace = RequestTrace(request.request_id, request.model)
        answering = self._answering[request.request_id] = Answering(timeout_s, delivered, trace)
        self._idle.clear()
        try:
            with trace:
                async with contextlib.aclosing(self._resuming.answer(request, answering)) as pieces:
                    async for piece in pieces:
                        yield piece
            self._admission.note_answer(answering.delivered.num_tokens // max(request.sampling.n, 1))
        finally:
            del self._answering[request.request_id]
            if not self._answering:
                self._idle.set()

    def check_wait(self, num_ahead: int, *, num_sequences: int, timeout_s: float | None) -> None:
        """Raises Overloaded if a request had better not wait behind `num_ahead` others for rows that are all held."""
        rooms = [link.room for link in self._membership.links if link.is_ready]
        self._admission.check(
            [together(rooms, num_ahead)] if rooms else [],
            num_sequences=num_sequences,
            max_tokens=None,
            time_left_s=timeout_s,
            criticality=current_criticality(),
        )

    def _admit(self, request: AnyRequest, timeout_s: float | None) -> None:
        """Raises Overloaded."""
        links = [
            link
            for link in self._membership.links
            if link.is_ready and link.model and request.model in ("", link.model.name)
        ]
        num_sequences = max(request.sampling.n, 1)
        if any(link.has_rows(num_sequences) for link in links):
            self._admission.note_room()
            return
        self._admission.check(
            [link.room for link in links],
            num_sequences=num_sequences,
            max_tokens=request.sampling.max_tokens if request.sampling.HasField("max_tokens") else None,
            time_left_s=timeout_s,
            criticality=current_criticality(),
        )

    async def tokenize(
        self, request: generation_pb2.TokenizeRequest, *, timeout_s: float | None
    ) -> generation_pb2.TokenizeResponse:
        """See Backend."""
        return await self._ask(
            request.model,
            lambda link: generation_pb2_grpc.GenerationServiceStub(link.channel).Tokenize(request, timeout=timeout_s),
        )

    async def detokenize(
        self, request: generation_pb2.DetokenizeRequest, *, timeout_s: float | None
    ) -> generation_pb2.DetokenizeResponse:
        """See Backend."""
        return await self._ask(
            request.model,
            lambda link: generation_pb2_grpc.GenerationServiceStub(link.channel).Detokenize(request, timeout=timeout_s),
        )

    async def model_info(self, model: str) -> control_pb2.ModelInfo:
        """See Backend."""
        link = (await self._placement.ready(model, Answering(None)))[0]
        if link.model is None:
            raise ReplicaLost(link.name)
        return link.model

    def server_info(self) -> control_pb2.ServerInfo:
        """See Backend."""
        return self._server_info()

    def loads(self) -> Sequence[control_pb2.ReplicaLoad]:
        """See Backend."""
        return [
            control_pb2.ReplicaLoad(
                replica=link.name,
                address=link.address,
                incarnation=link.incarnation,
                state=link.state,
                load=link.load if link.is_attached else None,
                router_outstanding_tokens=link.outstanding_tokens,
                router_streams=link.num_streams,
                breaker=BREAKERS[link.vitals.breaker.state],
                slowness=link.vitals.slowness.estimate,
                model=link.model.name if link.model else "",
            )
            for link in self._membership.links
        ]

    def held(self) -> Sequence[control_pb2.HeldRequests]:
        """See Backend."""
        return self._placement.held

    async def drain(self, replica: str, *, grace_s: float) -> None:
        """See Backend."""
        if not replica:
            await self._drain_self(grace_s)
            return
        link = next((link for link in self._membership.links if link.name == replica and link.is_attached), None)
        if link is None:
            raise UnknownReplica(replica)
        request = control_pb2.DrainRequest(grace_s=grace_s)
        await _remote(control_pb2_grpc.ControlServiceStub(link.channel).Drain(request, timeout=grace_s + 10))

    def abort(self, request_id: str) -> bool:
        """See Backend."""
        answering = self._answering.get(request_id)
        if answering is None:
            return False
        answering.fail(RequestAborted())
        self.links_changed()
        return True

    def fail_all(self, error: Exception) -> None:
        """End every request that is being answered."""
        for answering in self._answering.values():
            answering.fail(error)
        self.links_changed()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is being answered; False when that took too long."""
        return await happens_within(self._idle, timeout_s)

    async def _drain_self(self, grace_s: float) -> None:
        self._is_draining = True
        self.links_changed()
        if not await self.wait_idle(grace_s):
            self.fail_all(Draining())
            await self.wait_idle(CUT_OFF_S)

    async def _ask(self, model: str, call: Callable[[Link], Awaitable[T]]) -> T:
        """A call that any replica can answer."""
        answering = Answering(None)
        for budget in range(self._config.resume_budget, -1, -1):
            link = (await self._placement.ready(model, answering))[0]
            try:
                return await _remote(call(link))
            except RemoteError as error:
                if budget == 0 or error.code != UNAVAILABLE:
                    raise
                answering.refused.add(link.incarnation)
        raise AssertionError("the first try takes nothing from the budget")


async def _remote(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise DeadlineExceeded from error
        raise RemoteError(error.code().value[0], error.details() or "") from error
