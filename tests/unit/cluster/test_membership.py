from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import RouterConfig
from cluster.errors import StaleIncarnation
from cluster.router import quota_share
from cluster.router.membership import MAX_REPLICAS, Membership
from protos import control_pb2, replica_pb2
from tests.fakes.fake_link import FakeLink
from worker.errors import InvalidRequest


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def create_membership(clock: FakeClock | None = None) -> tuple[Membership, list[FakeLink]]:
    links: list[FakeLink] = []

    def create_link(address: str, incarnation: str) -> Any:
        links.append(FakeLink(address, incarnation))
        return links[-1]

    return Membership(RouterConfig(), create_link, clock=clock or FakeClock()), links


def announcement(incarnation: str, *, replica: str = "a", address: str = "127.0.0.1:1", state: int = 2) -> Any:
    return replica_pb2.AnnounceRequest(
        replica=replica,
        address=address,
        incarnation=incarnation,
        state=state,  # type: ignore[arg-type]
    )


def test_a_replica_is_dialed_when_it_announces_itself_and_once_only() -> None:
    membership, links = create_membership()
    for _ in range(5):
        membership.announce(announcement("1"))
    assert [(link.address, link.incarnation, link.calls) for link in links] == [("127.0.0.1:1", "1", ["start"])]


def test_a_newer_process_takes_the_place_of_an_older_one() -> None:
    membership, links = create_membership()
    membership.announce(announcement("1"))
    membership.announce(announcement("2", address="127.0.0.1:2"))
    assert links[0].calls == ["start", "retire"]
    assert links[1].calls == ["start"]


def test_an_older_process_never_takes_the_place_of_a_newer_one() -> None:
    membership, links = create_membership()
    membership.announce(announcement("2"))
    links[0].is_attached = False
    with pytest.raises(StaleIncarnation):
        membership.announce(announcement("1", address="127.0.0.1:2"))
    assert len(links) == 1
    assert links[0].calls == ["start"]


@given(st.lists(st.sampled_from("123456"), min_size=1, max_size=30))
def test_whatever_the_order_of_announcements_the_newest_process_stays(incarnations: list[str]) -> None:
    membership, _ = create_membership()
    newest = ""
    for incarnation in incarnations:
        if incarnation < newest:
            with pytest.raises(StaleIncarnation):
                membership.announce(announcement(incarnation))
        else:
            membership.announce(announcement(incarnation))
        newest = max(newest, incarnation)
        retired = [link.incarnation for link in membership._leaving]
        assert newest not in retired
        assert membership._members["a"].incarnation == newest


def test_a_lost_replica_is_dialed_again_as_soon_as_it_is_heard_of() -> None:
    membership, links = create_membership()
    membership.announce(announcement("1"))
    links[0].is_attached = False
    membership.announce(announcement("1"))
    assert links[0].calls == ["start", "poke"]


async def test_a_lost_and_silent_replica_is_forgotten_and_an_attached_one_is_not() -> None:
    clock = FakeClock()
    membership, links = create_membership(clock)
    membership.announce(announcement("1", replica="lost"))
    membership.announce(announcement("2", replica="attached", address="127.0.0.1:2"))
    links[0].is_attached = False
    await membership.sweep()
    assert len(membership.links) == 2
    clock.now_s += 3.5
    await membership.sweep()
    assert [link.incarnation for link in membership.links] == ["2"]
    assert links[0].calls[-1] == "stop"


async def test_a_replaced_replica_goes_when_its_last_request_is_answered() -> None:
    membership, links = create_membership()
    membership.announce(announcement("1"))
    links[0].num_streams = 1
    membership.announce(announcement("2", address="127.0.0.1:2"))
    await membership.sweep()
    assert links[0].calls == ["start", "retire"]
    links[0].num_streams = 0
    await membership.sweep()
    assert links[0].calls[-1] == "stop"
    assert len(membership.links) == 1


@pytest.mark.parametrize("state", [control_pb2.REPLICA_STATE_STOPPED, control_pb2.REPLICA_STATE_FAILED])
def test_a_replica_that_says_goodbye_before_it_is_known_is_not_dialed(state: int) -> None:
    membership, links = create_membership()
    membership.announce(announcement("1", state=state))
    assert links == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"replica": ""}, "replica"),
        ({"replica": "a b"}, "replica"),
        ({"replica": "x" * 129}, "replica"),
        ({"incarnation": ""}, "incarnation"),
        ({"incarnation": "\n"}, "incarnation"),
        ({"address": ""}, "address"),
        ({"address": "127.0.0.1:0"}, "address"),
        ({"address": "http://127.0.0.1:80"}, "address"),
    ],
)
def test_an_announcement_that_makes_no_sense_is_refused_by_name(changes: dict[str, str], field: str) -> None:
    membership, _ = create_membership()
    request = announcement("1")
    for name, value in changes.items():
        setattr(request, name, value)
    with pytest.raises(InvalidRequest) as caught:
        membership.announce(request)
    assert caught.value.field == field


def test_the_number_of_replicas_is_bounded() -> None:
    membership, _ = create_membership()
    for number in range(MAX_REPLICAS):
        membership.announce(announcement("1", replica=f"r{number}"))
    with pytest.raises(InvalidRequest, match="the limit"):
        membership.announce(announcement("1", replica="one-more"))


def test_as_many_routers_count_as_the_replica_with_most_of_them_says() -> None:
    clock = FakeClock()
    membership, links = create_membership(clock)
    membership.count_routers()
    assert membership.quota_share.num_routers == 1
    for name in "ab":
        membership.announce(announcement("1", replica=name))
    links[0].num_routers, links[1].num_routers = 3, 1
    membership.count_routers()
    assert membership.quota_share.num_routers == 3
    links[0].num_routers = 2
    for _ in range(2):
        membership.count_routers()
        assert membership.quota_share.num_routers == 3
        clock.now_s += quota_share.HOLD_S / 2
    membership.count_routers()
    assert membership.quota_share.num_routers == 2


def test_a_verdict_goes_to_every_replica() -> None:
    membership, links = create_membership()
    for name in "ab":
        membership.announce(announcement(name, replica=name))
    membership.tell({b"k": 1.0})
    assert [link.told for link in links] == [[{b"k": 1.0}]] * 2
