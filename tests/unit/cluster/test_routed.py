"""When a replica counts as known to its routers."""

from __future__ import annotations

import asyncio
import time

import pytest

from cluster.replica import routed
from cluster.replica.routed import Routed


async def test_one_router_of_two_is_not_enough() -> None:
    found = Routed(("a:1", "b:1"))
    found.note_taken("a:1", "router-a")
    found.note_taken("b:1", "router-b")
    found.note_answered("router-a")
    assert found.missing == ["b:1"]
    assert not await found.wait(0.05)
    waiting = asyncio.create_task(found.wait(10))
    await asyncio.sleep(0.01)
    found.note_answered("router-b")
    assert await waiting


async def test_a_router_that_takes_no_announcement_is_waited_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed, "ABSENT_AFTER_S", 0.2)
    found = Routed(("a:1", "away:1"))
    found.note_taken("a:1", "router-a")
    found.note_answered("router-a")
    began_s = time.monotonic()
    assert await found.wait(10)
    assert 0.15 < time.monotonic() - began_s < 5


async def test_with_every_router_away_it_is_not_known_to_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed, "ABSENT_AFTER_S", 0.05)
    assert not await Routed(("away:1",)).wait(0.2)
    assert not await Routed(()).wait(0.1)


async def test_without_addresses_any_router_will_do() -> None:
    found = Routed(())
    found.note_answered("told-by-its-config")
    assert await found.wait(1)


async def test_an_address_that_is_no_longer_announced_to_does_not_count() -> None:
    found = Routed(("a:1", "b:1"))
    for address, name in (("a:1", "router-a"), ("b:1", "router-b")):
        found.note_taken(address, name)
    found.note_answered("router-a")
    found.announce_to(("a:1",))
    found.note_taken("b:1", "router-b")
    assert found.missing == []
    assert await found.wait(1)


async def test_a_router_that_started_anew_must_have_an_answer_of_its_own() -> None:
    found = Routed(("a:1",))
    found.note_taken("a:1", "router-old")
    found.note_answered("router-old")
    found.note_taken("a:1", "router-new")
    assert found.missing == ["a:1"]
