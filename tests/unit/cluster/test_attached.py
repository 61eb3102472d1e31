"""What a replica does for the routers that are attached to it together."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from cluster.expiring_set import ExpiringSet
from cluster.replica.attached import MAX_VERDICT_S, MAX_VERDICTS, AttachedRouters

GUILTY = bytes(16)


class Session:
    def __init__(self, router: str = "") -> None:
        self.router = router
        self.calls: list[str] = []
        self.told: list[Mapping[bytes, float]] = []

    def dismiss(self) -> None:
        self.calls.append("dismiss")

    def readmit(self) -> None:
        self.calls.append("readmit")

    def tell(self, verdicts: Mapping[bytes, float]) -> None:
        self.told.append(verdicts)


def attached(*names: str) -> tuple[AttachedRouters, list[Session]]:
    routers, sessions = AttachedRouters(), [Session(name) for name in names]
    for session in sessions:
        routers.add(session)
    return routers, sessions


def test_routers_are_counted_by_name_and_one_without_a_name_is_one_more() -> None:
    routers, sessions = attached("a", "b", "a", "")
    assert routers.count == 3
    routers.discard(sessions[0])
    assert routers.count == 3, "the first stream of a router that has dialed again has yet to break"
    routers.discard(sessions[2])
    assert routers.count == 2


def test_a_router_that_is_left_drains_each_time_it_attaches_and_counts_no_more() -> None:
    routers, (first, other) = attached("a", "b")
    routers.dismiss({"a"})
    assert (first.calls, other.calls, routers.count) == (["dismiss"], [], 1)
    again = Session()
    routers.add(again)
    again.router = "a"
    routers.note_name(again)
    assert again.calls == ["dismiss"]


def test_a_router_that_is_back_is_told_so_once() -> None:
    routers, (session,) = attached("a")
    routers.dismiss({"a"})
    for _ in range(2):
        routers.readmit("a")
    assert (session.calls, routers.count) == (["dismiss", "readmit"], 1)


def test_a_verdict_reaches_every_other_router_once_and_those_that_come_later() -> None:
    routers, (source, other) = attached("a", "b")
    for _ in range(2):
        routers.note_verdict(source, GUILTY, 60.0)
    routers.note_verdict(other, GUILTY, 60.0)
    assert (source.told, other.told) == ([], [{GUILTY: 60.0}])
    late = Session()
    routers.add(late)
    (told,) = late.told
    assert 59 < told[GUILTY] <= 60


@pytest.mark.parametrize(("key", "ttl_s"), [(b"", 60.0), (bytes(17), 60.0), (GUILTY, 0.0), (GUILTY, -1.0)])
@pytest.mark.parametrize("nonsense", [False, True])
def test_what_cannot_be_a_verdict_is_not_passed_on(key: bytes, ttl_s: float, nonsense: bool) -> None:
    routers, (source, other) = attached("a", "b")
    routers.note_verdict(source, key, math.nan if nonsense else ttl_s)
    routers.note_verdict(source, key, math.inf if nonsense else ttl_s)
    assert other.told == []


def test_verdicts_are_bounded_in_number_and_time() -> None:
    routers, (source, other) = attached("a", "b")
    for number in range(MAX_VERDICTS + 10):
        routers.note_verdict(source, number.to_bytes(16), 1e9)
    assert {ttl_s for told in other.told for ttl_s in told.values()} == {MAX_VERDICT_S}
    late = Session()
    routers.add(late)
    assert list(late.told[0]) == [number.to_bytes(16) for number in range(10, MAX_VERDICTS + 10)]


def test_entries_of_a_set_end_by_themselves_and_begin_anew() -> None:
    now_s = 100.0
    entries = ExpiringSet(2, clock=lambda: now_s)
    entries.add(b"a", 10)
    entries.add(b"b", 5)
    assert entries.left() == {b"a": 10, b"b": 5}
    now_s += 4
    entries.add(b"a", 10)
    now_s += 2
    assert (b"a" in entries, b"b" in entries) == (True, False)
    assert entries.left() == {b"a": 8}
    for key in (b"x", b"y"):
        entries.add(key, 1)
    assert b"a" not in entries
