"""Several routers over the same replicas: which they are, what they give out together, what they tell each other."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.client import InternalError, Unavailable
from cluster.config import ReplicaConfig
from cluster.replica import router_list, session
from cluster.replica.server import HEARD_WITHIN_S
from cluster.router import quota_share
from cluster.router.link import Link
from protos import control_pb2, fault_pb2, fault_pb2_grpc
from tests.fakes.script import script
from tests.fakes.script_engine import ScriptKnobs
from tests.fakes.script_pool import FAST, ScriptPool, ScriptReplica, script_pool, start_replica
from tests.fakes.waiting import until

PROMPT = (10, 20, 30)
POISON = (66, 6)
DRAINING = control_pb2.REPLICA_STATE_DRAINING


@asynccontextmanager
async def two_routers(step_s: float = 0.005) -> AsyncIterator[tuple[ScriptPool, ScriptPool, ScriptReplica]]:
    """Both with the same replica."""
    async with script_pool(1, knobs=ScriptKnobs(step_s=step_s)) as first, script_pool(0) as second:
        (one,) = first.replicas
        one.server.announce_to((first.router.address, second.router.address))
        await second.router.wait_ready(timeout_s=20)
        yield first, second, one


async def test_a_router_that_is_left_finishes_what_runs_gets_nothing_new_and_forgets_the_replica() -> None:
    async with two_routers() as (first, second, one):
        stream = first.client.stream(PROMPT, max_tokens=400, seed=1)
        pieces = [await anext(stream)]
        one.server.announce_to((second.router.address,))
        await until(lambda: list(first.states.values()) == [DRAINING], 2)
        with pytest.raises(Unavailable):
            await first.client.generate(PROMPT, max_tokens=2)
        pieces += [piece async for piece in stream]
        assert tuple(token for piece in pieces for token in piece.token_ids) == script(PROMPT, 1, 0, 400)
        assert {piece.execution.attempts for piece in pieces if piece.execution} == {1}
        assert (await second.client.generate(PROMPT, max_tokens=2)).token_ids
        await until(lambda: first.states == {}, 10)
        assert second.num_ready == 1


async def test_what_a_router_sends_before_it_knows_that_it_is_left_is_served_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_routers() as (first, second, one):
        other = await start_replica(replace(one.server._config, routers=(first.router.address,)))
        await first.router.wait_ready(2, timeout_s=20)
        monkeypatch.setattr(session.AttachSession, "_state_changed", lambda _: None)  # the news is lost on its way
        one.server.announce_to((second.router.address,))
        await asyncio.sleep(0.2)
        assert first.num_ready == 2
        answers = await asyncio.gather(*(first.client.generate(PROMPT, max_tokens=8, seed=1) for _ in range(8)))
        assert {answer.token_ids for answer in answers} == {script(PROMPT, 1, 0, 8)}
        assert {answer.execution.replica for answer in answers if answer.execution} == {other.server.name}
        await other.stop()


async def test_a_router_that_only_has_another_address_notices_nothing() -> None:
    async with two_routers() as (first, second, one):
        states: list[dict[str, int]] = []
        port = first.router.address.rpartition(":")[2]
        one.server.announce_to((f"localhost:{port}", second.router.address))
        for _ in range(30):
            states.append(first.states)
            await asyncio.sleep(0.1)
        assert all(state == states[0] for state in states)


async def test_a_router_that_is_back_is_served_at_once() -> None:
    async with two_routers() as (first, second, one):
        both = (first.router.address, second.router.address)
        one.server.announce_to(both[1:])
        await until(lambda: first.num_ready == 0, 2)
        one.server.announce_to(both)
        await until(lambda: first.num_ready == 1, 1)
        await asyncio.sleep(2 * session.LINGER_S)
        assert first.num_ready == 1
        one.server.announce_to(both[1:])
        await until(lambda: first.states == {}, 10)
        one.server.announce_to(both)
        await until(lambda: first.num_ready == 1, 2)


async def test_routers_know_by_how_many_a_quota_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_share, "HOLD_S", 1.0)
    monkeypatch.setattr(quota_share.next_share, "__kwdefaults__", {"hold_s": 1.0})
    async with two_routers() as (first, second, one):
        shares = [pool.router._num_sharing for pool in (first, second)]
        await until(lambda: [share() for share in shares] == [2, 2], 2)
        one.server.announce_to((second.router.address,))
        await until(lambda: shares[1]() == 1, 5)


async def test_with_whole_quotas_each_router_gives_out_all_of_them() -> None:
    async with script_pool(1, router=replace(FAST, split_quotas=False)) as first, script_pool(0) as second:
        first.replicas[0].server.announce_to((first.router.address, second.router.address))
        await until(lambda: second.router._num_sharing() == 2, 5)
        assert first.router._membership.quota_share.num_routers == 2
        assert first.router._num_sharing() == 1


async def poisoned(address: str) -> None:
    """Make a replica end when it computes POISON."""
    fault: Any = fault_pb2.PromptFault(prompt_token_ids=POISON)
    async with grpc.aio.insecure_channel(address) as channel:
        await fault_pb2_grpc.FaultServiceStub(channel).Inject(fault_pb2.InjectRequest(kill=fault))


async def test_what_one_router_found_guilty_no_other_router_tries() -> None:
    async with script_pool(0) as first, script_pool(0) as second:
        routers = [first.router.address, second.router.address]
        for name in ("r0", "r1", "r2"):
            await poisoned((await first.spawn(name, {"routers": routers, "enable_fault_injection": True})).address)
        await second.router.wait_ready(3, timeout_s=10)
        for pool in (first, second, first, second):
            with pytest.raises(InternalError) as caught:
                await pool.client.generate(POISON, max_tokens=4)
            assert caught.value.is_poison
        assert sum(process.process.returncode is None for process in first.processes) == 1
        assert (await second.client.generate(PROMPT, max_tokens=2)).token_ids


@asynccontextmanager
async def emptied_by_poison(within_s: float) -> AsyncIterator[tuple[ScriptPool, ScriptPool, dict[str, Any]]]:
    """Two routers that both lost both replicas to it, of which the first alone has a verdict; and what replicas are given."""
    patient = replace(FAST, wait_for_replica_s=20.0)
    async with script_pool(0, router=patient) as first, script_pool(0, router=patient) as second:
        options = {"routers": [first.router.address, second.router.address], "enable_fault_injection": True}
        for name in ("r0", "r1"):
            await poisoned((await first.spawn(name, options)).address)
        await second.router.wait_ready(2, timeout_s=10)
        with pytest.raises(InternalError):
            await first.client.generate(POISON, max_tokens=4)
        await until(lambda: second.num_ready == 0, within_s)
        yield first, second, options


async def test_a_verdict_that_ended_every_replica_is_there_before_the_first_successor_takes_anything() -> None:
    async with emptied_by_poison(5) as (first, second, options):
        again = asyncio.create_task(second.client.generate(POISON, max_tokens=4))
        await asyncio.sleep(0.2)
        successor = await first.spawn("r0", options, step_s=0.02)  # a canary takes its time; the news none
        with pytest.raises(InternalError) as caught:
            await again
        assert caught.value.is_poison
        assert successor.process.returncode is None


async def test_a_successor_learns_of_a_verdict_before_it_is_ready_for_anybody_however_late_its_router_dials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with emptied_by_poison(10) as (first, second, options):
        dial_late(first, 1.0, monkeypatch)
        again = asyncio.create_task(second.client.generate(POISON, max_tokens=4))
        await until(lambda: second.router.pool.num_live == 1, 5)
        successor = await first.spawn("r0", options, step_s=0.0001)
        with pytest.raises(InternalError) as caught:
            await again
        assert caught.value.is_poison
        assert successor.process.returncode is None
        assert second.router._quarantine.verdicts


def dial_late(pool: ScriptPool, delay_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router takes announcements, but is slow to attach."""
    create = pool.router._membership._create_link

    def create_late(address: str, incarnation: str) -> Link:
        link = create(address, incarnation)
        start = link.start
        monkeypatch.setattr(link, "start", lambda: asyncio.get_running_loop().call_later(delay_s, start))
        return link

    monkeypatch.setattr(pool.router._membership, "_create_link", create_late)


async def test_a_router_that_does_not_answer_keeps_no_replica_from_its_work_for_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        silent_port, closed_port = (one.getsockname()[1] for one in (silent, closed))
        closed.close()
        async with script_pool(0) as pool:
            took_s = {}
            for port in (closed_port, silent_port):
                began_s = time.monotonic()
                config = ReplicaConfig(routers=(pool.router.address, f"127.0.0.1:{port}"))
                replica = await start_replica(config)
                took_s[port] = time.monotonic() - began_s
                await pool.router.wait_ready(1, timeout_s=20)
                await replica.stop()
                await until(lambda: pool.num_ready == 0, 5)
        assert took_s[closed_port] < HEARD_WITHIN_S
        assert took_s[silent_port] < HEARD_WITHIN_S + 1.0


async def test_a_replica_follows_a_file_of_routers_without_a_new_start(tmp_path: Path) -> None:
    file = tmp_path / "routers"
    async with script_pool(0) as first, script_pool(0) as second:
        file.write_text(f"{first.router.address}\n")
        one = await start_replica(ReplicaConfig(routers=(f"file:{file}",)))
        await first.router.wait_ready(timeout_s=5)
        assert second.num_ready == 0
        file.write_text(f"# both\n{first.router.address}\n{second.router.address}\n")
        await second.router.wait_ready(timeout_s=10)
        assert first.num_ready == 1
        stream = first.client.stream(PROMPT, max_tokens=400, seed=1)
        pieces = [await anext(stream)]
        file.write_text(f"{second.router.address}\n")
        pieces += [piece async for piece in stream]
        assert tuple(token for piece in pieces for token in piece.token_ids) == script(PROMPT, 1, 0, 400)
        await until(lambda: first.num_ready == 0, 10)
        assert second.num_ready == 1
        await one.stop()


async def test_a_replica_announces_itself_to_every_address_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async with script_pool(0) as first, script_pool(0) as second:
        known = [first.router.address]

        async def resolve(_host: str, _port: int) -> list[str]:
            return list(known)

        monkeypatch.setattr(router_list, "_addresses", resolve)
        monkeypatch.setattr(router_list, "DNS_PERIOD_S", 0.1)
        monkeypatch.setattr(router_list, "FILE_PERIOD_S", 0.1)
        one = await start_replica(ReplicaConfig(routers=("dns:routers:50050",)))
        await first.router.wait_ready(timeout_s=5)
        known.append(second.router.address)
        await second.router.wait_ready(timeout_s=10)
        assert first.num_ready == 1
        await one.stop()
