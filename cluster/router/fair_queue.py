"""Turns of tenants in front of a pool that is full: deficit round robin over tokens, and a gate that uses it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cluster.criticality import current_criticality
from cluster.errors import QuotaExceeded
from worker.errors import DeadlineExceeded

QUANTUM_TOKENS = 512.0
"""What a tenant of weight 1 may spend in one round; a smaller one is fairer over short times, and takes more rounds."""
MAX_HEADROOM = 0.25
"""Of the rows, at most this part is kept for tenants that hold less than their share."""
REMEMBERED_S = 60.0
"""A tenant that asked for nothing for this long is not expected: no row is kept for it."""
RETRY_S = 0.5

T = TypeVar("T")
CheckWait = Callable[[int, int, float | None], None]


@dataclass(slots=True)
class _Flow(Generic[T]):
    weight: float = 1.0
    deficit: float = 0.0
    waiting: deque[tuple[float, T, int]] = field(default_factory=deque)
    """(cost, item, rank), the highest rank first."""


class FairQueue(Generic[T]):
    """Deficit round robin: each tenant with something waiting spends `quantum` times its weight a round.

    A tenant that sends ten times as much waits ten times as long; the others do not notice. What it did not spend it
    keeps for the next round, but only while something of it waits.
    """

    def __init__(self, quantum: float = QUANTUM_TOKENS) -> None:
        self._quantum = quantum
        self._flows: dict[str, _Flow[T]] = {}
        self._round: deque[str] = deque()
        """Tenants with something waiting; the first is at its turn."""
        self._is_served = False
        """Whether the first has had its quantum of this round."""

    def __len__(self) -> int:
        return sum(len(flow.waiting) for flow in self._flows.values())

    @property
    def tenants(self) -> list[str]:
        """Those with something waiting."""
        return list(self._round)

    def num_waiting(self, tenant: str) -> int:
        """Of one tenant."""
        flow = self._flows.get(tenant)
        return 0 if flow is None else len(flow.waiting)

    def num_ahead(self, tenant: str, rank: int) -> int:
        """Items that go before the next one of this tenant and rank, about: those of others take turns with its own."""
        flow = self._flows.get(tenant)
        own = 0 if flow is None else sum(one >= rank for _, _, one in flow.waiting)
        return own + sum(min(len(one.waiting), own + 1) for one in self._flows.values() if one is not flow)

    def push(self, tenant: str, cost: float, item: T, *, weight: float = 1.0, rank: int = 0) -> None:
        """Behind what the tenant has waiting of this rank or a higher one."""
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = _Flow()
            self._round.append(tenant)
        flow.weight = weight
        num_before = sum(one >= rank for _, _, one in flow.waiting)
        flow.waiting.insert(num_before, (cost, item, rank))

    def pop(self, may_go: Callable[[T], bool] = lambda _: True) -> T | None:
        """Whose turn it is, among tenants whose first item `may_go`; None when there is none."""
        held = {tenant for tenant, flow in self._flows.items() if not may_go(flow.waiting[0][1])}
        if len(held) == len(self._flows):
            return None
        while True:
            tenant = self._round[0]
            flow = self._flows[tenant]
            if tenant in held:
                self._next()
                continue
            if not self._is_served:
                flow.deficit += self._quantum * flow.weight
                self._is_served = True
            cost, item, _ = flow.waiting[0]
            if cost > flow.deficit:
                self._next()
                continue
            flow.deficit -= cost
            flow.waiting.popleft()
            self._drop_if_empty(tenant)
            return item

    def remove(self, tenant: str, item: T) -> None:
        """It waits no more."""
        flow = self._flows.get(tenant)
        if flow is not None:
            flow.waiting = deque(entry for entry in flow.waiting if entry[1] is not item)
            self._drop_if_empty(tenant)

    def _next(self) -> None:
        self._round.rotate(-1)
        self._is_served = False

    def _drop_if_empty(self, tenant: str) -> None:
        if self._flows[tenant].waiting:
            return
        del self._flows[tenant]
        if self._round[0] == tenant:
            self._is_served = False
        self._round.remove(tenant)


def headroom(capacity: int) -> int:
    """Rows to keep for those with less than their share, so that they need not wait for an end.

    Arrivals vary by the root of their number, so a large pool keeps a smaller part of its rows than a small one.
    """
    return min(math.isqrt(capacity), int(MAX_HEADROOM * capacity))


@dataclass(slots=True, eq=False)
class _Turn:
    tenant: str
    rows: int
    come: asyncio.Future[None]


class FairGate:
    """Lets requests through while the pool has rows for them, then in turns of their tenants.

    `capacity` tells the rows of the pool now; one request is always let through. A tenant's share of them goes by its
    weight among the tenants that are about: those with less than their share come first, and some rows are kept for
    them; the others take turns. It fails to be fair over times shorter than the longest answers: nothing that runs is
    ended. Of one tenant the most critical go first. `check_wait` is told what would be
    ahead of a request, its rows and its time before it waits, and may raise.
    """

    def __init__(
        self,
        capacity: Callable[[], int],
        *,
        max_waiting: int = 1024,
        check_wait: CheckWait = lambda num_ahead, rows, timeout_s: None,  # noqa: ARG005  # nobody minds
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._max_waiting = max_waiting
        self._check_wait = check_wait
        self._clock = clock
        self._seen_s: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._queue: FairQueue[_Turn] = FairQueue()
        self._rows: dict[str, int] = {}
        self._used = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._queue)

    @property
    def num_rows(self) -> int:
        """Rows of the requests that were let through and have not ended."""
        return self._used

    @contextlib.asynccontextmanager
    async def turn(
        self, tenant: str, *, cost: float, rows: int, weight: float = 1.0, timeout_s: float | None = None
    ) -> AsyncIterator[None]:
        """Wait for the request's turn, and hold its rows for the block.

        Raises QuotaExceeded when too many of the tenant wait already, what `check_wait` raises, and DeadlineExceeded
        when its turn does not come.
        """
        await self._wait(tenant, cost, rows, weight, timeout_s)
        try:
            yield
        finally:
            self._release(tenant, rows)

    def look_again(self) -> None:
        """The capacity has changed."""
        while (turn := self._queue.pop(self._may_go_first) or self._queue.pop(self._may_go)) is not None:
            if not turn.come.done():  # else it was cancelled, and its task has not run since
                self._hold(turn.tenant, turn.rows)
                turn.come.set_result(None)

    async def _wait(self, tenant: str, cost: float, rows: int, weight: float, timeout_s: float | None) -> None:
        turn = _Turn(tenant, rows, asyncio.get_running_loop().create_future())
        self._seen_s[tenant] = self._clock()
        self._weights[tenant] = weight
        if not self._queue.num_waiting(tenant) and self._may_go(turn):
            self._hold(tenant, rows)
            return
        if self._queue.num_waiting(tenant) >= self._max_waiting:
            raise QuotaExceeded(f"{self._max_waiting} waiting requests", RETRY_S)
        rank = current_criticality()
        self._check_wait(self._queue.num_ahead(tenant, rank), rows, timeout_s)
        self._queue.push(tenant, cost, turn, weight=weight, rank=rank)
        self.look_again()
        try:
            async with asyncio.timeout(timeout_s):
                await turn.come
        except TimeoutError:
            self._leave(turn)
            raise DeadlineExceeded from None
        except BaseException:
            self._leave(turn)
            raise

    def _leave(self, turn: _Turn) -> None:
        """It gave up: while it waited, or in the very moment its turn came."""
        if turn.come.done() and not turn.come.cancelled():
            self._release(turn.tenant, turn.rows)
        else:
            self._queue.remove(turn.tenant, turn)

    def _may_go(self, turn: _Turn) -> bool:
        capacity, used = self._capacity(), self._used
        if not used:
            return True
        if used + turn.rows > capacity:
            return False
        return self._is_within_share(turn, capacity) or used + turn.rows <= capacity - headroom(capacity)

    def _may_go_first(self, turn: _Turn) -> bool:
        return self._may_go(turn) and self._is_within_share(turn, self._capacity())

    def _is_within_share(self, turn: _Turn, capacity: int) -> bool:
        """Whether its tenant would hold no more than its share with it."""
        self._forget()
        share = capacity * self._weights[turn.tenant] / sum(self._weights.values())
        return self._rows.get(turn.tenant, 0) + turn.rows <= share

    def _forget(self) -> None:
        """Tenants that ask for nothing any more."""
        oldest_s = self._clock() - REMEMBERED_S
        for tenant in [tenant for tenant, seen_s in self._seen_s.items() if seen_s < oldest_s]:
            if tenant not in self._rows and not self._queue.num_waiting(tenant):
                del self._seen_s[tenant], self._weights[tenant]

    def _hold(self, tenant: str, rows: int) -> None:
        self._used += rows
        self._rows[tenant] = self._rows.get(tenant, 0) + rows

    def _release(self, tenant: str, rows: int) -> None:
        self._used -= rows
        left = self._rows[tenant] - rows
        if left:
            self._rows[tenant] = left
        else:
            del self._rows[tenant]
        self.look_again()
