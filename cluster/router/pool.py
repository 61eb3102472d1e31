"""A Backend over many replicas."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from cluster import codec
from cluster.codec import AnyRequest
from cluster.config import RouterConfig
from cluster.errors import NoReplicaAvailable, RemoteError, ReplicaLost, UnknownModel, UnknownReplica
from cluster.metrics.router import RouterMetrics
from cluster.router.answering import Answering
from cluster.router.link import Link
from cluster.router.membership import Membership
from cluster.router.policies import Policy
from cluster.router.stream import LinkStream
from cluster.router.vitals import BREAKERS
from cluster.router.want import want_of
from protos import control_pb2, control_pb2_grpc, generation_pb2, generation_pb2_grpc
from worker.errors import DeadlineExceeded, Draining, RequestAborted

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]
CUT_OFF_S = 1.0
"""After a drain's grace: for the errors of what was cut off to reach their clients."""

T = TypeVar("T")


class Pool:
    """Places each request on a replica, and again on another one if the first is lost before anything came from it."""

    def __init__(
        self,
        config: RouterConfig,
        membership: Membership,
        policy: Policy,
        *,
        server_info: Callable[[], control_pb2.ServerInfo],
        on_change: Callable[[], None],
        metrics: RouterMetrics,
    ) -> None:
        self._config = config
        self._membership = membership
        self._policy = policy
        self._server_info = server_info
        self._on_change = on_change
        self._metrics = metrics
        self._answering: dict[str, Answering] = {}
        self._changed = asyncio.Event()
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
    def num_live(self) -> int:
        """Requests being answered now."""
        return len(self._answering)

    def links_changed(self) -> None:
        """Some replica became ready or ceased to be: those who wait for one look again."""
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    async def wait_changed(self) -> None:
        """Return after the next change."""
        await self._changed.wait()

    async def generate(
        self, request: AnyRequest, *, timeout_s: float | None
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """See Backend."""
        if self._is_draining:
            raise Draining
        answering = self._answering[request.request_id] = Answering(timeout_s)
        self._idle.clear()
        try:
            refused: set[str] = set()
            for attempt in range(1, self._config.placement_budget + 1):
                link = await self._place(request, answering, refused)
                stream = self._open(link, request, attempt, answering)
                try:
                    async for piece in stream:
                        if not answering.has_started:
                            self._note_start(answering)
                        yield answering.stamp(piece)
                    return
                except (ReplicaLost, RemoteError) as error:
                    may_repeat = attempt < self._config.placement_budget and not answering.has_started
                    if not may_repeat or not _is_loss(error):
                        raise
                    if isinstance(error, RemoteError):
                        refused.add(link.incarnation)
                finally:
                    stream.close()
        finally:
            del self._answering[request.request_id]
            if not self._answering:
                self._idle.set()

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
        link = (await self._ready(model, Answering(None), set()))[0]
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
            )
            for link in self._membership.links
        ]

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
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _drain_self(self, grace_s: float) -> None:
        self._is_draining = True
        self.links_changed()
        if not await self.wait_idle(grace_s):
            self.fail_all(Draining())
            await self.wait_idle(CUT_OFF_S)

    async def _place(self, request: AnyRequest, answering: Answering, refused: set[str]) -> Link:
        links = await self._ready(request.model, answering, refused)
        prompt_cost, answer_cost = _cost(request, links[0])
        want = want_of(request, prompt_cost=prompt_cost, answer_cost=answer_cost)
        return links[self._policy([link.candidate for link in links], want)]

    def _open(self, link: Link, request: AnyRequest, attempt: int, answering: Answering) -> LinkStream:
        prompt_cost, answer_cost = _cost(request, link)
        stream = link.open(
            request,
            attempt=attempt,
            timeout_s=answering.time_left_s(),
            prompt_cost=prompt_cost,
            cost=prompt_cost + answer_cost,
        )
        answering.placed(stream)
        self._metrics.placed(attempt)
        return stream

    def _note_start(self, answering: Answering) -> None:
        self._metrics.started(placed_after_s=answering.placed_after_s, first_token_s=answering.elapsed_s)

    async def _ready(self, model: str, answering: Answering, refused: set[str]) -> list[Link]:
        """Ready replicas of the model, at least one; waits for it if need be."""
        give_up_s = time.monotonic() + self._config.wait_for_replica_s
        while True:
            answering.check()
            ready = [link for link in self._membership.links if link.is_ready and link.incarnation not in refused]
            links = [link for link in ready if not model or (link.model and link.model.name == model)]
            if links:
                return links
            if ready and ready[0].model:
                raise UnknownModel(ready[0].model.name)
            await self._wait_for_change(give_up_s, answering)

    async def _wait_for_change(self, give_up_s: float, answering: Answering) -> None:
        left_s = give_up_s - time.monotonic()
        if left_s <= 0:
            raise NoReplicaAvailable(self._config.wait_for_replica_s)
        time_left_s = answering.time_left_s()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s if time_left_s is None else min(left_s, time_left_s)):
                await self._changed.wait()

    async def _ask(self, model: str, call: Callable[[Link], Awaitable[T]]) -> T:
        """A call that any replica can answer."""
        refused: set[str] = set()
        for attempt in range(1, self._config.placement_budget + 1):
            link = (await self._ready(model, Answering(None), refused))[0]
            try:
                return await _remote(call(link))
            except RemoteError as error:
                if attempt == self._config.placement_budget or not _is_loss(error):
                    raise
                refused.add(link.incarnation)
        raise AssertionError("the budget is at least one")


def _cost(request: AnyRequest, link: Link) -> tuple[int, int]:
    """Tokens of the prompt, and of its answers at most."""
    context = link.model.max_model_len if link.model else 1
    prompt = min(codec.prompt_estimate(request), context)
    left = max(1, context - prompt)
    sampling = request.sampling
    answer = min(sampling.max_tokens, left) if sampling.HasField("max_tokens") else left
    return prompt, answer * (sampling.n if sampling.HasField("n") else 1)


def _is_loss(error: ReplicaLost | RemoteError) -> bool:
    return isinstance(error, ReplicaLost) or error.code == UNAVAILABLE


async def _remote(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise DeadlineExceeded from error
        raise RemoteError(error.code().value[0], error.details() or "") from error
