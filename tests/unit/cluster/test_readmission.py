"""When a replica gets its canaries."""

from __future__ import annotations

import asyncio
import logging

import pytest

from cluster.errors import CanaryFailed
from cluster.router import readmission
from cluster.router.breaker import BreakerState
from cluster.router.places import Places
from cluster.router.readmission import Readmission
from cluster.router.vitals import Vitals
from tests.fakes.waiting import until

GPU = "GPU-1"
LONG_S = 60.0


class Replica:
    """Attached, on a GPU where so many processes ended before."""

    name = "r"
    incarnation = "now"

    def __init__(self, num_ends: int, *, pause_s: float = LONG_S, num_failing: int = 0) -> None:
        self.places = Places(pause_min_s=pause_s)
        for number in range(num_ends):
            self.places.ended(GPU, str(number), "it crashed")
        self.has_others = True
        self.vitals = Vitals(pause_min_s=0.01, pause_max_s=0.01, may_open=lambda: self.has_others, places=self.places)
        self.vitals.note_place(GPU, self.incarnation)
        self.num_canaries = self.num_changes = 0
        self._num_failing = num_failing
        self.readmission = Readmission(self, self._canary, self._note_change)

    @property
    def is_closed(self) -> bool:
        return self.vitals.breaker.is_closed

    async def _canary(self) -> None:
        self.num_canaries += 1
        if self.num_canaries <= self._num_failing:
            raise CanaryFailed(self.name, "no answer")

    def _note_change(self) -> None:
        self.num_changes += 1


async def test_after_one_bad_end_in_its_place_the_next_replica_gets_its_canary_at_once() -> None:
    one = Replica(1)
    one.readmission.start()
    await until(lambda: one.is_closed, 1)
    assert (one.num_canaries, one.num_changes) == (1, 1)


async def test_after_two_it_waits_and_the_log_says_where_and_why(caplog: pytest.LogCaptureFixture) -> None:
    one = Replica(2, pause_s=0.3)
    with caplog.at_level(logging.WARNING):
        one.readmission.start()
        await asyncio.sleep(0.05)
        assert one.vitals.breaker.state is BreakerState.OPEN
        assert one.num_canaries == 0
        await until(lambda: one.is_closed, 5)
    (line,) = [record.getMessage() for record in caplog.records]
    assert all(part in line for part in (GPU, "2 processes in a row", "it crashed"))


async def test_it_waits_no_longer_once_nobody_else_takes_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readmission, "LOOK_AGAIN_S", 0.01)
    one = Replica(5)
    one.readmission.start()
    await asyncio.sleep(0.05)
    assert not one.is_closed
    one.has_others = False
    await until(lambda: one.is_closed, 2)


async def test_it_waits_no_longer_once_a_request_was_found_to_have_ended_its_predecessors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readmission, "LOOK_AGAIN_S", 0.01)
    one = Replica(2)
    one.readmission.start()
    await asyncio.sleep(0.05)
    one.places.excuse({"0"})
    await until(lambda: one.is_closed, 2)


async def test_canaries_that_fail_are_tried_again_and_the_log_names_the_gpu(caplog: pytest.LogCaptureFixture) -> None:
    one = Replica(0, num_failing=2)
    with caplog.at_level(logging.WARNING):
        one.readmission.start()
        await until(lambda: one.is_closed, 2)
    assert one.num_canaries == 3
    assert all(GPU in record.getMessage() for record in caplog.records)


async def test_what_is_in_service_is_left_there_whatever_ended_beside_it() -> None:
    one = Replica(0)
    one.readmission.start()
    await until(lambda: one.is_closed, 1)
    for number in range(3):
        one.places.ended(GPU, f"beside-{number}", "it crashed")
    one.readmission.start()
    await asyncio.sleep(0.05)
    assert one.is_closed
    assert one.num_canaries == 1


async def test_a_replica_that_is_gone_gets_none() -> None:
    one = Replica(2, pause_s=0.05)
    one.readmission.start()
    await asyncio.sleep(0.01)
    one.readmission.cancel()
    await asyncio.sleep(0.1)
    assert one.num_canaries == 0
