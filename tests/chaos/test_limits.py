"""A router whose surroundings fail it: no file descriptors, nobody who reads its log, a clock that jumps."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import time

import pytest

from cluster.client import AsyncGraphpoolClient, DeadlineExceeded
from cluster.config import ReplicaConfig
from tests.chaos.chaos_pool import ONE_TRY, QUICK, ChaosPool, chaos_pool
from tests.chaos.oracle import Question
from tests.fakes.router_process import spawn_router
from tests.fakes.script_engine import ScriptKnobs, script
from tests.fakes.script_pool import script_pool, start_replica

NUM_FILES = 256


def questions(count: int) -> list[Question]:
    return [Question(prompt=(11, number + 3), max_tokens=100, seed=number) for number in range(count)]


async def test_a_router_without_file_descriptors_serves_whom_it_has_and_recovers() -> None:
    limited = ("sh", "-c", f'ulimit -n {NUM_FILES}; exec "$@"', "sh")
    async with chaos_pool(2, prefix=limited, step_s=0.02) as pool:
        asked = [asyncio.create_task(pool.ask(question)) for question in questions(8)]
        host, _, port = pool.routers[0].address.rpartition(":")
        sockets: list[socket.socket] = []
        for _ in range(2 * NUM_FILES):
            one = socket.socket()
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect((host, int(port)))
            sockets.append(one)
        await asyncio.sleep(1.0)
        more = [asyncio.create_task(pool.ask(question)) for question in questions(8)]
        records = await asyncio.gather(*asked, *more)
        assert [record for record in records if not record.is_right] == []
        for one in sockets:
            one.close()
        async with AsyncGraphpoolClient(pool.routers[0].address) as newcomer:
            answer = await newcomer.generate((11, 3), max_tokens=5, seed=1, timeout_s=20)
        assert answer.token_ids == script((11, 3), 1, 0, 5)
        # Links to replicas need descriptors too.
        await pool.replicas["r0"].kill()
        await pool.spawn("r0")
        await pool.wait_ready(2)


def full_pipe() -> tuple[int, int]:
    """Whoever writes to it waits for ever."""
    reading, writing = os.pipe()
    flags = fcntl.fcntl(writing, fcntl.F_GETFL)
    fcntl.fcntl(writing, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x")
    fcntl.fcntl(writing, fcntl.F_SETFL, flags)
    return reading, writing


async def test_a_router_whose_log_nobody_reads_goes_on() -> None:
    reading, writing = full_pipe()
    router = await spawn_router(QUICK, stderr=writing, log_level="DEBUG")
    os.close(writing)
    pool = ChaosPool([router], AsyncGraphpoolClient(router.address, ONE_TRY), {"step_s": 0.01})
    try:
        for name in ("r0", "r1"):
            await pool.spawn(name)
        await pool.wait_ready(2)
        for _ in range(3):
            asked = [asyncio.create_task(pool.ask(question)) for question in questions(8)]
            await asyncio.sleep(0.3)
            await pool.replicas["r0"].kill()
            await pool.spawn("r0")
            records = await asyncio.gather(*asked)
            assert [record for record in records if not record.is_right] == []
            await pool.wait_ready(2)
    finally:
        await pool.close()
        os.close(reading)


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
async def test_a_clock_that_jumps_an_hour_moves_no_deadline(jump_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async with script_pool(2, knobs=ScriptKnobs(step_s=0.01)) as pool:
        real, real_ns = time.time, time.time_ns
        running = [
            asyncio.create_task(pool.client.generate((3, n), max_tokens=80, seed=n, timeout_s=20)) for n in range(6)
        ]
        late = asyncio.create_task(pool.client.generate((4, 4), max_tokens=3000, timeout_s=1.0))
        await asyncio.sleep(0.3)
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + round(jump_s * 1e9))
        answers = await asyncio.gather(*running)
        started_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await late
        assert time.monotonic() - started_s < 1.5
        # gRPC asks Python for the time when a call begins and the kernel after that: only one of them has jumped here.
        after = await pool.client.generate((5, 5), max_tokens=10, seed=5)
        assert pool.num_ready == 2
    assert [answer.token_ids for answer in answers] == [script((3, n), n, 0, 80) for n in range(6)]
    assert after.token_ids == script((5, 5), 5, 0, 10)


async def test_a_process_that_starts_after_its_clock_went_back_takes_the_place_of_a_dead_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with script_pool(1, replica=ReplicaConfig(name="place")) as pool:
        (first,) = pool.replicas
        await first.stop()
        real_ns = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() - 3600 * 10**9)
        second = await start_replica(ReplicaConfig(name="place", routers=(pool.router.address,)))
        assert second.server.incarnation < first.server.incarnation
        await pool.router.wait_ready(1, timeout_s=10)
        assert (await pool.client.generate((6, 6), max_tokens=4, seed=2)).token_ids == script((6, 6), 2, 0, 4)
        await second.stop()
