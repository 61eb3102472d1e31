"""Finding a replica for a request, and waiting for one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from cluster import codec
from cluster.codec import AnyRequest
from cluster.config import RouterConfig
from cluster.errors import NoReplicaAvailable, UnknownModel
from cluster.router.answering import Answering
from cluster.router.link import Link
from cluster.router.membership import Membership
from cluster.router.policies import Policy, without_stragglers
from cluster.router.want import want_of
from cluster.waiting import happens_within
from protos import control_pb2

Fits = Callable[[Link], bool]


class Placement:
    """Chooses among the replicas that take requests; who finds none waits for the next change."""

    def __init__(self, config: RouterConfig, membership: Membership, policy: Policy) -> None:
        self._config = config
        self._membership = membership
        self._policy = policy
        self._changed = asyncio.Event()
        self._waiting: list[tuple[str, float]] = []
        """(model, since when) of those who wait although no replica of their model takes requests."""
        self._known_models: set[str] = set()
        """Of replicas that were ready at some time: a model that has none now may have some again."""

    @property
    def held(self) -> list[control_pb2.HeldRequests]:
        """Requests without a replica of their model, by model."""
        now_s = time.monotonic()
        by_model: dict[str, list[float]] = {}
        for model, since_s in self._waiting:
            by_model.setdefault(model, []).append(now_s - since_s)
        return [
            control_pb2.HeldRequests(model=model, requests=len(ages), oldest_s=max(ages))
            for model, ages in by_model.items()
        ]

    @property
    def num_ready(self) -> int:
        """Replicas that take requests."""
        return sum(link.is_ready for link in self._membership.links)

    @property
    def step_s(self) -> float:
        """Of the replica whose steps are the longest; 0 before any is known."""
        return max((link.load.step_ms / 1000 for link in self._membership.links if link.is_ready), default=0.0)

    def note_change(self) -> None:
        """Those who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_changed(self) -> None:
        """Return after the next change."""
        await self._changed.wait()

    async def choose(
        self,
        request: AnyRequest,
        answering: Answering,
        fits: Fits = lambda _: True,
        *,
        is_held: Fits = lambda _: False,
    ) -> Link:
        """The replica the request goes to, rather not one that `is_held`.

        Raises UnknownModel, NoReplicaAvailable or what ends the request.
        """
        links = await self.ready(answering.model or request.model, answering, fits)
        prompt_cost, answer_cost = cost_of(request, links[0], answering)
        want = want_of(request, prompt_cost=prompt_cost, answer_cost=answer_cost)
        candidates = [link.candidate for link in links]
        held = {index for index, link in enumerate(links) if is_held(link)}
        worthwhile = without_stragglers(candidates, want.num_sequences, held)
        chosen = links[worthwhile[self._policy([candidates[index] for index in worthwhile], want)]]
        # What one model has begun no other may go on with, also where the request names none.
        answering.model = chosen.model.name if chosen.model else ""
        return chosen

    async def ready(self, model: str, answering: Answering, fits: Fits = lambda _: True) -> list[Link]:
        """Ready replicas of the model that fit, at least one; waits for it if need be.

        While there are ready ones that do not fit now, there is no end to the waiting but the request's own.
        """
        # An answer that was taken on is worth more patience than a request that can still go elsewhere.
        patience_s = self._config.wait_to_resume_s if answering.num_placements else self._config.wait_for_replica_s
        give_up_s = time.monotonic() + patience_s
        while True:
            answering.check()
            links = self._of_model(model, answering.refused)
            fitting = [link for link in links if fits(link)]
            if fitting:
                return fitting
            if links:
                give_up_s = time.monotonic() + patience_s
                await self.wait(patience_s, answering)
                continue
            if time.monotonic() >= give_up_s:
                raise NoReplicaAvailable(patience_s)
            with self._holding(model):
                await self.wait(give_up_s - time.monotonic(), answering)

    @contextlib.contextmanager
    def _holding(self, model: str) -> Iterator[None]:
        entry = (model, time.monotonic())
        self._waiting.append(entry)
        try:
            yield
        finally:
            self._waiting.remove(entry)

    def has_other(self, request: AnyRequest, link: Link, answering: Answering) -> bool:
        """Whether another replica takes requests of this model, and has not refused this one."""
        return any(one is not link for one in self._of_model(answering.model or request.model, answering.refused))

    def has_sounder(self, link: Link) -> bool:
        """Whether another replica of its model is ready whose place is not failing."""
        name = link.model.name if link.model else ""
        ready = (one for one in self._membership.links if one.is_ready and not one.vitals.is_failing)
        return any(one is not link and one.model is not None and one.model.name == name for one in ready)

    async def wait(self, limit_s: float, answering: Answering) -> None:
        """For the next change, at most `limit_s` and what is left of the request's time."""
        time_left_s = answering.time_left_s()
        await happens_within(self._changed, limit_s if time_left_s is None else min(limit_s, time_left_s))

    def _of_model(self, model: str, refused: Collection[str]) -> Sequence[Link]:
        ready = [link for link in self._membership.links if link.is_ready and link.incarnation not in refused]
        links = [link for link in ready if not model or (link.model and link.model.name == model)]
        self._known_models |= {link.model.name for link in ready if link.model}
        if not links and ready and ready[0].model and model not in self._known_models:
            raise UnknownModel(ready[0].model.name)
        return links


def cost_of(request: AnyRequest, link: Link, answering: Answering) -> tuple[int, int]:
    """Tokens to prefill, and to answer at most, given what was delivered."""
    context = link.model.max_model_len if link.model else 1
    prompt = min(codec.prompt_estimate(request), context)
    left = max(1, context - prompt)
    sampling = request.sampling
    num_choices = sampling.n if sampling.HasField("n") else 1
    answer = num_choices * (min(sampling.max_tokens, left) if sampling.HasField("max_tokens") else left)
    num_delivered = answering.delivered.num_tokens
    return prompt + num_delivered, max(1, answer - num_delivered)
