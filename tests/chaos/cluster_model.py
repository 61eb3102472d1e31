"""The same cluster with a real model in its replicas: every answer is held to the one it gave while nothing was broken.

Few streams and short answers: a model on a CPU takes a core for itself. Deterministic mode makes answers comparable,
whichever replica gave which part of them.
"""

from __future__ import annotations

from tests.chaos.cluster_pool import ClusterPool, cluster_pool  # first: it sets what gRPC reads when it is imported

import asyncio  # isort: skip
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from bench.chaos_questions import questions
from cluster.autoscale.config import ScalingConfig
from cluster.client import AsyncGraphpoolClient
from tests.chaos.cluster_events import ClusterLoad, Event
from tests.chaos.oracle import Record
from tests.chaos.real_answers import ChoiceAnswer, RealQuestion, compare, hold_to, watch
from tests.fakes.ray_cluster import PATIENT
from worker.config import WorkerConfig

WAIT_S = 600.0
"""For replicas to come: they load a model and check its arithmetic, on cores that others use too."""
PATIENCE_S = 240.0
CALM_S = 10.0
NUM_REPLICAS = 2
FEW_ROWS, ROWS = 4, 8
"""Rows of a replica while load decides how many there are, and afterwards."""
SCALING = ScalingConfig(
    min_replicas=1,
    max_replicas=NUM_REPLICAS,
    target_occupancy=1.0,
    target_ttft_s=60.0,
    down_after_s=8.0,
    replica_start_s=120.0,
)
ROUTER = {"canary_timeout_s": 60.0, "wait_to_resume_s": 240.0, "wait_for_replica_s": 60.0}
"""A router that waits for a replica as long as a model takes to load here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """What a campaign does: load that rises and falls once, and so many rounds of what is lost and restarted."""

    model: str = "smollm2-135m"
    streams: int = 4
    questions: int = 12
    rounds: int = 1
    min_tokens: int = 24
    max_tokens: int = 48
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("streams", "questions", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if not 1 <= self.min_tokens <= self.max_tokens <= 128:
            raise ValueError(f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}, must be in [1, 128]")

    def worker(self, max_batch: int) -> WorkerConfig:
        """One thread, a deterministic one."""
        return WorkerConfig(
            model=self.model,
            device="cpu",
            deterministic=True,
            cpu_threads=1,
            max_model_len=256,
            max_batch=max_batch,
            kv_cache_bytes=96 << 20,
        )

    def asked(self) -> list[RealQuestion]:
        """Of every kind, with logprobs: they are compared too."""
        draw = random.Random(self.seed)
        made = questions(self.questions, seed=self.seed, vocab_size=0, has_text=True, shows_gaps=True)
        lengths = [draw.randint(self.min_tokens, self.max_tokens) for _ in made]
        return [
            replace(one, sampling={**one.sampling, "max_tokens": length})
            for one, length in zip(made, lengths, strict=True)
        ]


class ModelLoad(ClusterLoad):
    """Clients that ask what has been answered before."""

    def __init__(
        self, client: AsyncGraphpoolClient, asked: Sequence[tuple[RealQuestion, list[ChoiceAnswer]]], *, seed: int
    ) -> None:
        super().__init__(client, seed=seed, max_tokens=0, patience_s=PATIENCE_S)
        self._asked = asked

    async def answer(self, draw: random.Random) -> Record:
        """One of them again."""
        question, undisturbed = draw.choice(self._asked)
        whole = await watch(self._client, question, patience_s=self._patience_s)
        if whole.record.error is None:
            compare(whole, undisturbed)
            hold_to(whole, undisturbed)
        return whole.record


@dataclass(slots=True)
class ModelCampaign:
    """One run over a pool."""

    plan: ModelPlan
    pool: ClusterPool
    events: list[Event] = field(default_factory=list)

    async def run(self) -> list[Event]:
        """Everything of the plan, in turn; the last event is what happened between them."""
        await self.pool.deploy_model(self.plan.worker(FEW_ROWS), scaling=SCALING)
        await self.pool.whole(1, timeout_s=WAIT_S)
        load = ModelLoad(self.pool.client, await self.undisturbed(), seed=self.plan.seed)
        load.resize(1)
        await self._event(load, "load rises: 1 to 2 replicas", lambda: self.scaled(load, self.plan.streams, 2))
        await self._event(load, "load falls: 2 to 1 replicas", lambda: self.scaled(load, 1, 1))
        await self.restart()
        load.resize(self.plan.streams)
        await self._event(load, "nothing", lambda: asyncio.sleep(CALM_S))
        self.events[-1].whole_s = 0.0
        for _ in range(self.plan.rounds):
            await self._event(load, "node killed", self.lose_node)
            await self._event(load, "controller and a replica killed", self.lose_controller)
            await self._event(load, "rolling restart of 2 replicas", self.restart)
        await load.end()
        self._over(load.between)
        return self.events

    async def undisturbed(self) -> list[tuple[RealQuestion, list[ChoiceAnswer]]]:
        """Each question by itself. Raises AssertionError if one is not answered even so."""
        found = []
        for question in self.plan.asked():
            whole = await watch(self.pool.client, question, patience_s=PATIENCE_S)
            assert whole.record.is_right, (whole.record.violations, whole.record.error)
            found.append((question, whole.choices))
        return found

    async def scaled(self, load: ModelLoad, num_streams: int, num_replicas: int) -> None:
        """Load changes, and the number of replicas follows."""
        load.resize(num_streams)
        await self.pool.whole(num_replicas, timeout_s=WAIT_S)

    async def restart(self) -> None:
        """Every replica is replaced, one after the other."""
        before = await self.pool.ready()
        await self.pool.deploy_model(self.plan.worker(ROWS), num_replicas=NUM_REPLICAS)
        await self.pool.whole(NUM_REPLICAS, without=before, timeout_s=WAIT_S)

    async def lose_node(self) -> None:
        """The other replica carries all, until there is a new node for its successor."""

        async def kill() -> int:
            num_lost = await self.pool.kill_fullest_node()
            await self.pool.whole(NUM_REPLICAS - num_lost, timeout_s=WAIT_S)
            await self.pool.ray.call(self.pool.ray.add_node)
            return num_lost

        await self._lose(kill)

    async def lose_controller(self) -> None:
        """Together with a replica, which only the next controller replaces."""
        ray = self.pool.ray
        controller = await ray.call(ray.controller)
        assert controller is not None
        controller.kill()
        await self._lose(lambda: ray.call(ray.kill_replica))

    async def _lose(self, kill: Callable[[], Awaitable[int]]) -> None:
        before = await self.pool.ready()
        num_lost = await kill()
        await self.pool.until(
            lambda ready: len(ready) == NUM_REPLICAS and len(ready - before) >= num_lost, WAIT_S, look_every_s=0.25
        )

    async def _event(self, load: ModelLoad, name: str, happens: Callable[[], Awaitable[None]]) -> None:
        async with load.during(name) as event:
            await happens()
        self._over(event)

    def _over(self, event: Event) -> None:
        self.events.append(event)
        print(event.line(), flush=True)


async def run_model(plan: ModelPlan) -> list[Event]:
    """The whole campaign."""
    async with cluster_pool(router=ROUTER, dead_node=PATIENT) as pool:
        return await ModelCampaign(plan, pool).run()
