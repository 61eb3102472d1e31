"""Several routers over several replicas, all of which are frozen, killed and cut off at random while clients come and go.

    python -m tests.chaos.fleet_campaign --seconds 60 --seed 7
    python -m tests.chaos.fleet_campaign --seconds 60 --seed 7 --proxied   # networks break, too

Answers are those of a script: lost, repeated and changed tokens show. What happens comes from the seed; when exactly does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil

from cluster.client import AsyncGraphpoolClient, CallError
from cluster.config import ClientConfig
from protos import control_pb2, fault_pb2, fault_pb2_grpc
from tests.chaos.chaos_pool import PATIENT, QUICK
from tests.chaos.oracle import Outcome, Question, Record, ask, random_question, watch
from tests.chaos.tcp_proxy import TcpProxy
from tests.fakes.replica_process import ReplicaProcess, spawn_replica
from tests.fakes.router_process import spawn_router
from tests.fakes.scrape import scrape

NUM_ROUTERS, NUM_REPLICAS = 2, 3
NUM_ASKERS, NUM_LEAVERS = 10, 4
STEP_S = 0.005
PATIENCE_S = 60.0
BETWEEN_S = (0.5, 2.5)
FROZEN_S = (0.2, 4.0)


@dataclass(slots=True)
class Fleet:
    """Everything that runs. Names and ports stay over restarts."""

    is_proxied: bool
    ports: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, int] = field(default_factory=dict)
    processes: dict[str, ReplicaProcess] = field(default_factory=dict)
    ways: dict[tuple[str, str], TcpProxy] = field(default_factory=dict)
    """From each router to each replica, if it is proxied; replicas do not announce themselves then."""

    @property
    def routers(self) -> list[str]:
        return [name for name in self.ports if name.startswith("router")]

    @property
    def replicas(self) -> list[str]:
        return [name for name in self.ports if name.startswith("r-")]

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    async def start(self) -> None:
        names = [*(f"router-{n}" for n in range(NUM_ROUTERS)), *(f"r-{n}" for n in range(NUM_REPLICAS))]
        ports = free_ports(2 * len(names))
        self.ports, self.metrics = (
            dict(zip(names, ports, strict=False)),
            dict(zip(names, ports[len(names) :], strict=True)),
        )
        if self.is_proxied:
            for router in self.routers:
                for replica in self.replicas:
                    way = self.ways[router, replica] = TcpProxy(self.address(replica))
                    await way.start()
        await asyncio.gather(*(self.spawn(name) for name in names))

    async def spawn(self, name: str) -> None:
        shared = {"listen": self.address(name), "name": name, "metrics_listen": f"127.0.0.1:{self.metrics[name]}"}
        if name in self.routers:
            replicas = [way.address for (router, _), way in self.ways.items() if router == name]
            self.processes[name] = await spawn_router({**QUICK, **shared, "replicas": replicas})
            return
        routers = [] if self.is_proxied else [self.address(router) for router in self.routers]
        config = {**shared, "routers": routers, "announce_period_s": 0.2, "enable_fault_injection": True}
        self.processes[name] = await spawn_replica(config, {**PATIENT, "step_s": STEP_S})

    async def stop(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                await process.kill()
        for way in self.ways.values():
            await way.stop()

    def client(self) -> AsyncGraphpoolClient:
        return AsyncGraphpoolClient(targets=[self.address(router) for router in self.routers], config=ClientConfig())

    async def whole(self, timeout_s: float = 30.0) -> None:
        """Until every router has every replica, and nothing of any request."""
        async with asyncio.timeout(timeout_s):
            while not all([await self._is_at_rest(router) for router in self.routers]):  # noqa: ASYNC110  # no event of theirs comes here
                await asyncio.sleep(0.1)

    async def _is_at_rest(self, router: str) -> bool:
        async with AsyncGraphpoolClient(self.address(router)) as client:
            try:
                loads = [one for one in await client.loads() if one.state == control_pb2.REPLICA_STATE_READY]
            except CallError:
                return False
        here = sum(one.router_streams + one.router_outstanding_tokens for one in loads)
        return len(loads) == NUM_REPLICAS and here + sum(one.load.running + one.load.waiting for one in loads) == 0

    async def vitals(self) -> dict[str, tuple[int, float]]:
        """Of each process: MiB, and tasks on its event loop."""
        found = {}
        for name, process in self.processes.items():
            tasks = (await scrape(f"127.0.0.1:{self.metrics[name]}")).value("event_loop_tasks")
            found[name] = psutil.Process(process.pid).memory_info().rss >> 20, tasks
        return found


@dataclass(slots=True)
class Findings:
    """What clients saw."""

    records: list[Record] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    num_left: int = 0
    num_poisoned: int = 0
    """Replicas that a request ended."""
    before: dict[str, tuple[int, float]] = field(default_factory=dict)
    after: dict[str, tuple[int, float]] = field(default_factory=dict)

    def judge(self, record: Record, may_fail: tuple[type[Exception], ...] = ()) -> None:
        self.records.append(record)
        self.problems += record.violations
        if record.outcome is Outcome.STUCK:
            self.problems.append(f"stuck after {record.num_tokens} tokens")
        elif record.outcome is Outcome.FAILED and not isinstance(record.error, may_fail):
            self.problems.append(f"{type(record.error).__name__} after {record.num_tokens} tokens: {record.error}")


class Campaign:
    """One run over a fleet."""

    def __init__(self, fleet: Fleet, seed: int, *, hands: int = 1) -> None:
        """As many `hands` break things at the same time; with several, both routers may be gone at once."""
        self._hands = hands
        self._may_fail: tuple[type[Exception], ...] = (CallError,) if hands > 1 else ()
        self.fleet = fleet
        self.findings = Findings()
        self._draw = random.Random(seed)
        self._is_over = False
        self._busy: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By name, of the process that something is done to."""

    async def run(self, seconds: float) -> Findings:
        await self.fleet.whole()
        self.findings.before = await self.fleet.vitals()
        asking = [asyncio.create_task(self._ask_on(n)) for n in range(NUM_ASKERS)]
        asking.append(asyncio.create_task(self._keep()))
        asking += [asyncio.create_task(self._leave_on(n)) for n in range(NUM_LEAVERS)]
        await asyncio.gather(*(self._break_on(time.monotonic() + seconds) for _ in range(self._hands)))
        self._is_over = True
        _, pending = await asyncio.wait(asking, timeout=PATIENCE_S)
        self.findings.problems += [f"{len(pending)} clients hang"] if pending else []
        for task in asking:
            task.cancel()
        for result in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(result, Exception):
                self.findings.problems.append(repr(result))
        try:
            await self.fleet.whole()
        except TimeoutError:
            self.findings.problems.append("the fleet does not come to rest")
        self.findings.after = await self.fleet.vitals()
        return self.findings

    async def _break_on(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            await asyncio.sleep(self._draw.uniform(*BETWEEN_S))
            await self._event()

    async def _keep(self) -> None:
        """As a supervisor would: what a request ended is started again."""
        while not self._is_over:
            await asyncio.sleep(0.1)
            for name in self.fleet.replicas:
                async with self._busy[name]:
                    if self.fleet.processes[name].process.returncode is not None:
                        self.findings.num_poisoned += 1
                        await self.fleet.spawn(name)

    async def _event(self) -> None:
        kinds = [*EVENTS, *(NETWORK_EVENTS if self.fleet.is_proxied else ())]
        kind = self._draw.choice(kinds)
        self.findings.events[kind.__name__.strip("_")] += 1
        await kind(self)

    async def _ask_on(self, number: int) -> None:
        draw = random.Random(number)
        async with self.fleet.client() as client:
            while not self._is_over:
                question = random_question(draw, max_tokens=200)
                async with ask(client, question) as stream:
                    self.findings.judge(await watch(question, stream, patience_s=PATIENCE_S), self._may_fail)

    async def _leave_on(self, number: int) -> None:
        """Clients that go away in the middle."""
        draw = random.Random(1000 + number)
        async with self.fleet.client() as client:
            while not self._is_over:
                question = random_question(draw, max_tokens=200)
                with contextlib.suppress(CallError):
                    async with ask(client, question) as stream, asyncio.timeout(PATIENCE_S):
                        for _ in range(draw.randint(0, 5)):
                            await anext(stream, None)
                self.findings.num_left += 1
                await asyncio.sleep(0.02)

    def _name(self, names: list[str]) -> str:
        return self._draw.choice(names)

    async def freeze_replica(self) -> None:
        await self._freeze(self._name(self.fleet.replicas))

    async def freeze_router(self) -> None:
        await self._freeze(self._name(self.fleet.routers))

    async def kill_replica(self) -> None:
        await self._kill(self._name(self.fleet.replicas))

    async def kill_router(self) -> None:
        await self._kill(self._name(self.fleet.routers))

    async def kill_both(self) -> None:
        """A router and a replica at once."""
        await asyncio.gather(self.kill_router(), self.kill_replica())

    async def drain_replica(self) -> None:
        await self._drain(self._name(self.fleet.replicas))

    async def drain_router(self) -> None:
        await self._drain(self._name(self.fleet.routers))

    async def poison(self) -> None:
        """A request that ends whoever computes it, through both routers one after the other."""
        prompt = tuple(self._draw.randrange(3, 500) for _ in range(16))
        fault: Any = fault_pb2.PromptFault(prompt_token_ids=prompt, after_tokens=self._draw.randrange(20))
        for name in self.fleet.replicas:
            async with grpc.aio.insecure_channel(self.fleet.address(name)) as channel:
                stub = fault_pb2_grpc.FaultServiceStub(channel)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stub.Inject(fault_pb2.InjectRequest(kill=fault), timeout=2)
        question = Question(prompt=prompt, max_tokens=60)
        for router in self.fleet.routers:
            async with AsyncGraphpoolClient(self.fleet.address(router)) as client, ask(client, question) as stream:
                self.findings.judge(await watch(question, stream, patience_s=PATIENCE_S), (CallError,))

    async def storm(self) -> None:
        """Deadlines that can hardly be met."""

        async def hurry(seed: int) -> None:
            draw = random.Random(seed)
            question = random_question(draw)
            timeout_s = draw.uniform(0.01, 0.4)
            async with self.fleet.client() as client, ask(client, question, timeout_s=timeout_s) as stream:
                self.findings.judge(await watch(question, stream, patience_s=PATIENCE_S), (CallError,))

        await asyncio.gather(*(hurry(self._draw.randrange(2**31)) for _ in range(30)))

    async def cut(self) -> None:
        """One router and one replica do not hear each other, in one direction or both."""
        way = self._draw.choice(list(self.fleet.ways.values()))
        there, back = self._draw.choice(((True, True), (True, False), (False, True)))
        way.blackhole(to_target=there, from_target=back)
        await asyncio.sleep(self._draw.uniform(*FROZEN_S))
        way.heal()

    async def reset(self) -> None:
        self._draw.choice(list(self.fleet.ways.values())).reset()

    async def _freeze(self, name: str) -> None:
        async with self._busy[name]:
            process = self.fleet.processes[name]
            _send(process, signal.SIGSTOP)
            await asyncio.sleep(self._draw.uniform(*FROZEN_S))
            _send(process, signal.SIGCONT)

    async def _drain(self, name: str) -> None:
        async with self._busy[name]:
            process = self.fleet.processes[name]
            _send(process, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.process.wait(), self._draw.uniform(0, 12))
            await self._replace(name)

    async def _kill(self, name: str) -> None:
        async with self._busy[name]:
            await self._replace(name)

    async def _replace(self, name: str) -> None:
        await self.fleet.processes[name].kill()
        await asyncio.sleep(self._draw.uniform(0, 0.5))
        await self.fleet.spawn(name)


def _send(process: ReplicaProcess, number: signal.Signals) -> None:
    """A request may have ended it meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        process.send(number)


Event = Callable[[Campaign], Awaitable[None]]
EVENTS = (
    *(Campaign.freeze_replica, Campaign.freeze_router, Campaign.kill_replica, Campaign.kill_router),
    *(Campaign.kill_both, Campaign.storm, Campaign.drain_replica, Campaign.drain_router, Campaign.poison),
)
NETWORK_EVENTS = (Campaign.cut, Campaign.cut, Campaign.reset)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


@contextlib.asynccontextmanager
async def fleet(*, is_proxied: bool) -> AsyncIterator[Fleet]:
    made = Fleet(is_proxied)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


async def run_campaign(seconds: float, seed: int, *, is_proxied: bool, hands: int = 1) -> Findings:
    """In a fleet of its own."""
    async with fleet(is_proxied=is_proxied) as made:
        return await Campaign(made, seed, hands=hands).run(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hands", type=int, default=1, help="things that break at the same time")
    parser.add_argument("--proxied", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(run_campaign(options.seconds, options.seed, is_proxied=options.proxied, hands=options.hands))
    complete = [record for record in found.records if record.is_right]
    print(f"{dict(found.events)}: {len(complete)} answers whole of {len(found.records)}, {found.num_left} left early")
    failed = Counter(type(record.error).__name__ for record in found.records if record.error)
    print(f"{found.num_poisoned} replicas ended by a request; failed: {dict(failed)}")
    print(
        f"moved {sum(record.attempts > 1 for record in complete)}, gap {max(r.longest_gap_s for r in complete):.2f} s"
    )
    print(f"MiB and tasks before {found.before}\n  after {found.after}")
    for problem, count in Counter(found.problems).most_common(20):
        print(f"{count} x {problem}")
    return int(bool(found.problems))


if __name__ == "__main__":
    sys.exit(main())
