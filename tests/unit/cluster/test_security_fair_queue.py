"""Turns of tenants in front of a full pool."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import QuotaExceeded
from cluster.router.capacity import num_rows
from cluster.router.fair_queue import FairGate, FairQueue, headroom
from protos import control_pb2
from worker.errors import DeadlineExceeded


def drained(queue: FairQueue[str]) -> list[str]:
    order = []
    while (item := queue.pop()) is not None:
        order.append(item)
    return order


def test_tenants_take_turns_however_much_one_of_them_sends() -> None:
    queue: FairQueue[str] = FairQueue(quantum=100)
    for _ in range(100):
        queue.push("noisy", 100, "noisy")
    for _ in range(10):
        queue.push("quiet", 100, "quiet")
    order = drained(queue)
    assert Counter(order[:20]) == {"noisy": 10, "quiet": 10}
    assert order[20:] == ["noisy"] * 90


def test_turns_are_of_tokens_and_not_of_requests() -> None:
    queue: FairQueue[str] = FairQueue(quantum=100)
    for _ in range(10):
        queue.push("long", 1000, "long")
    for _ in range(100):
        queue.push("short", 100, "short")
    order = drained(queue)
    spent = {"long": 0, "short": 0}
    for item in order[:100]:
        spent[item] += 1000 if item == "long" else 100
    assert abs(spent["long"] - spent["short"]) <= 1000


def test_weights_share_in_proportion() -> None:
    queue: FairQueue[str] = FairQueue(quantum=100)
    for _ in range(300):
        queue.push("gold", 50, "gold", weight=3)
        queue.push("plain", 50, "plain", weight=1)
    counts = Counter(drained(queue)[:200])
    assert counts["gold"] / counts["plain"] == pytest.approx(3, rel=0.1)


def test_a_tenant_saves_nothing_up_while_it_has_nothing_to_send() -> None:
    queue: FairQueue[str] = FairQueue(quantum=100)
    queue.push("a", 1, "a")
    assert queue.pop() == "a"
    for _ in range(10):
        queue.push("a", 100, "a")
        queue.push("b", 100, "b")
    assert Counter(drained(queue)[:10]) == {"a": 5, "b": 5}


def test_items_that_left_are_not_served_and_those_that_may_not_go_are_passed_over() -> None:
    queue: FairQueue[str] = FairQueue(quantum=10)
    for item in ("a1", "a2"):
        queue.push("a", 10, item)
    queue.push("b", 10, "b1")
    queue.remove("a", "a1")
    queue.remove("nobody", "x")
    assert queue.pop(lambda item: item != "a2") == "b1"
    assert queue.pop(lambda item: item != "a2") is None
    assert len(queue) == queue.num_waiting("a") == 1
    assert drained(queue) == ["a2"]


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 5000)), max_size=120),
    st.sampled_from([1.0, 64.0, 512.0]),
)
def test_everything_is_served_once_in_each_tenants_order_and_never_far_from_fair(
    arrivals: list[tuple[str, int]], quantum: float
) -> None:
    queue: FairQueue[tuple[str, int, int]] = FairQueue(quantum)
    left: Counter[str] = Counter()
    for number, (tenant, cost) in enumerate(arrivals):
        queue.push(tenant, cost, (tenant, number, cost))
        left[tenant] += 1
    order = []
    spent: Counter[str] = Counter()
    largest = max((cost for _, cost in arrivals), default=0)
    always = {tenant for tenant in left if left[tenant]}
    while (item := queue.pop()) is not None:
        order.append(item)
        spent[item[0]] += item[2]
        left[item[0]] -= 1
        always &= {tenant for tenant in left if left[tenant]}
        if len(always) > 1:
            amounts = [spent[tenant] for tenant in always]
            assert max(amounts) - min(amounts) <= 2 * (largest + quantum)
    assert sorted(number for _, number, _ in order) == list(range(len(arrivals)))
    for tenant in "abcd":
        numbers = [number for owner, number, _ in order if owner == tenant]
        assert numbers == sorted(numbers)
    assert len(queue) == 0


async def test_a_gate_lets_as_many_rows_through_as_there_are() -> None:
    gate = FairGate(lambda: 4)
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold(gate, "a", release)) for _ in range(10)]
    await asyncio.sleep(0)
    assert (gate.num_rows, gate.num_waiting) == (4, 6)
    release.set()
    await asyncio.gather(*tasks)
    assert (gate.num_rows, gate.num_waiting) == (0, 0)


async def test_a_request_of_many_rows_goes_through_an_empty_pool_however_small() -> None:
    gate = FairGate(lambda: 0)
    async with gate.turn("a", cost=1, rows=8):
        assert gate.num_rows == 8


async def test_rows_are_kept_for_a_tenant_with_less_than_its_share() -> None:
    gate = FairGate(lambda: 16)
    release = asyncio.Event()
    async with gate.turn("quiet", cost=1, rows=1):
        pass  # it was here lately
    tasks = [asyncio.create_task(hold(gate, "noisy", release)) for _ in range(40)]
    await asyncio.sleep(0)
    assert gate.num_rows == 12
    async with gate.turn("quiet", cost=1, rows=1, timeout_s=0.1):
        assert gate.num_rows == 13
    release.set()
    await asyncio.gather(*tasks)


async def test_a_row_that_falls_free_goes_to_whoever_has_less_than_its_share() -> None:
    gate = FairGate(lambda: 8)
    releases = [asyncio.Event() for _ in range(8)]
    noisy = [asyncio.create_task(hold(gate, "noisy", release)) for release in releases]
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(hold(gate, "noisy", asyncio.Event())) for _ in range(20)]
    quiet = [asyncio.create_task(hold(gate, "quiet", asyncio.Event())) for _ in range(3)]
    await asyncio.sleep(0)
    assert gate._rows == {"noisy": 8}
    for number, release in enumerate(releases[:3], 1):
        release.set()
        await asyncio.sleep(0.01)
        assert gate._rows == {"noisy": 8 - number, "quiet": number}
    for task in (*noisy, *waiting, *quiet):
        task.cancel()
    await asyncio.gather(*noisy, *waiting, *quiet, return_exceptions=True)
    assert (gate.num_rows, gate.num_waiting) == (0, 0)


async def test_shares_go_by_weight() -> None:
    gate = FairGate(lambda: 16)
    stop = asyncio.Event()

    async def forever(tenant: str, weight: float) -> None:
        while not stop.is_set():
            async with gate.turn(tenant, cost=10, rows=1, weight=weight):
                await asyncio.sleep(0.002)

    tasks = [asyncio.create_task(forever("gold", 3)) for _ in range(40)]
    tasks += [asyncio.create_task(forever("plain", 1)) for _ in range(40)]
    await asyncio.sleep(0.2)
    gold, plain = gate._rows.get("gold", 0), gate._rows.get("plain", 0)
    stop.set()
    await asyncio.gather(*tasks)
    assert abs(gold - 12) <= 2
    assert abs(plain - 4) <= 2


async def test_a_tenant_that_was_not_seen_for_a_minute_has_no_rows_kept() -> None:
    now_s = 0.0
    gate = FairGate(lambda: 16, clock=lambda: now_s)
    async with gate.turn("quiet", cost=1, rows=1):
        pass
    now_s = 61.0
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold(gate, "noisy", release)) for _ in range(40)]
    await asyncio.sleep(0)
    assert gate.num_rows == 16
    release.set()
    await asyncio.gather(*tasks)


async def test_a_turn_that_does_not_come_in_time_ends_and_leaves_nothing_behind() -> None:
    gate = FairGate(lambda: 1)
    async with gate.turn("a", cost=1, rows=1):
        with pytest.raises(DeadlineExceeded):
            async with gate.turn("b", cost=1, rows=1, timeout_s=0.02):
                pytest.fail("there was no row")
        waiter = asyncio.create_task(hold(gate, "b", asyncio.Event()))
        await asyncio.sleep(0)
        assert gate.num_waiting == 1
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert gate.num_waiting == 0
    assert gate.num_rows == 0


async def test_a_turn_that_comes_as_its_request_is_cancelled_is_given_back() -> None:
    gate = FairGate(lambda: 1)
    release = asyncio.Event()
    first = asyncio.create_task(hold(gate, "a", release))
    second = asyncio.create_task(hold(gate, "b", asyncio.Event()))
    await asyncio.sleep(0)
    release.set()
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert (gate.num_rows, gate.num_waiting) == (0, 0)


async def test_requests_cancelled_all_at_once_give_everything_back() -> None:
    gate = FairGate(lambda: 4)
    for _ in range(20):
        tasks = [asyncio.create_task(hold(gate, tenant, asyncio.Event())) for tenant in "abcd" * 10]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {asyncio.CancelledError}
        assert (gate.num_rows, gate.num_waiting) == (0, 0)


async def test_too_many_waiting_of_one_tenant_are_refused_and_others_are_not() -> None:
    gate = FairGate(lambda: 1, max_waiting=2)
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold(gate, "a", release)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QuotaExceeded, match="2 waiting requests"):
        await hold(gate, "a", release)
    other = asyncio.create_task(hold(gate, "b", release))
    await asyncio.sleep(0)
    assert gate.num_waiting == 3
    release.set()
    await asyncio.gather(*tasks, other)


async def test_a_pool_that_grows_lets_more_through() -> None:
    capacity = 1
    gate = FairGate(lambda: capacity)
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold(gate, "a", release)) for _ in range(3)]
    await asyncio.sleep(0)
    capacity = 3
    gate.look_again()
    assert gate.num_rows == 3
    release.set()
    await asyncio.gather(*tasks)


def test_few_rows_are_kept_of_a_large_pool_and_none_of_a_tiny_one() -> None:
    assert {rows: headroom(rows) for rows in (0, 1, 3, 4, 8, 16, 64, 256)} == {
        0: 0,
        1: 0,
        3: 0,
        4: 1,
        8: 2,
        16: 4,
        64: 8,
        256: 16,
    }


def test_rows_of_a_pool_are_those_its_replicas_report() -> None:
    tiers = [control_pb2.TierLoad(tier=64, free_slots=5), control_pb2.TierLoad(tier=256, free_slots=2)]
    assert num_rows([control_pb2.Load(max_rows=8), control_pb2.Load(running=3, tiers=tiers), control_pb2.Load()]) == 16


async def hold(gate: FairGate, tenant: str, release: asyncio.Event) -> None:
    async with gate.turn(tenant, cost=10, rows=1):
        await release.wait()
