"""By how many routers a quota is divided, with looks at times that the test says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import QuotaExceeded
from cluster.router.quota_share import MAX_ROUTERS, QuotaShare, next_share
from cluster.security.quota import Account, Quota


def after(*looks: tuple[float, int], hold_s: float = 10.0) -> int:
    share = QuotaShare()
    for now_s, num_seen in looks:
        share = next_share(share, num_seen, now_s, hold_s=hold_s)
    return share.num_routers


def test_one_more_router_counts_at_once() -> None:
    assert after((0, 1)) == 1
    assert after((0, 1), (0.5, 2)) == 2
    assert after((0, 3)) == 3


def test_a_router_that_is_away_for_a_moment_keeps_its_share() -> None:
    assert after((0, 2), (1, 1), (9, 1), (10, 2), (11, 1), (20.5, 1)) == 2


def test_one_less_counts_once_all_looks_of_the_hold_found_fewer() -> None:
    assert after((0, 3), (1, 1), (10.9, 1)) == 3
    assert after((0, 3), (1, 1), (11, 1)) == 1
    assert after((0, 3), (1, 1), (5, 2), (11, 1)) == 2, "the most that were there meanwhile"


def test_nothing_heard_changes_nothing() -> None:
    assert after((0, 2), (1, 0), (100, 0)) == 2
    assert after((0, 0)) == 1


def test_no_report_can_starve_tenants_altogether() -> None:
    assert after((0, 2**32 - 1)) == MAX_ROUTERS


@given(st.lists(st.integers(1, 5), min_size=1, max_size=60))
def test_never_fewer_than_were_seen_within_the_hold_and_never_more_than_ever(seen: list[int]) -> None:
    share, hold_s = QuotaShare(), 4.0
    for now, num_seen in enumerate(seen):
        share = next_share(share, num_seen, float(now), hold_s=hold_s)
        lately = seen[max(0, now - int(hold_s)) : now + 1]
        assert max(lately) <= share.num_routers <= max(1, *seen[: now + 1])


@pytest.mark.parametrize("num_routers", [1, 2, 3, 7])
def test_the_parts_of_all_routers_are_the_quota(num_routers: int) -> None:
    quota = Quota(tokens_per_s=700, burst_tokens=2100, max_streams=10)
    part = quota.part_of(num_routers)
    assert part.tokens_per_s * num_routers == pytest.approx(700)
    assert part.burst * num_routers == pytest.approx(2100)
    assert 10 <= part.max_streams * num_routers < 10 + num_routers
    assert Quota(tokens_per_s=5).part_of(num_routers).burst * num_routers == pytest.approx(50)


def test_what_has_no_limit_has_none_in_parts() -> None:
    part = Quota().part_of(3)
    assert (part.tokens_per_s, part.burst, part.max_streams) == (math.inf, math.inf, 0)


def test_over_a_minute_with_even_load_two_routers_give_out_one_quota() -> None:
    now_s = 0.0
    quota = Quota(tokens_per_s=100, burst_tokens=500)
    accounts = [Account("a", quota.part_of(2), clock=lambda: now_s) for _ in range(2)]
    given_out = 0
    for tick in range(600):
        now_s = tick / 10
        for account in accounts:
            try:
                account.open(20)
            except QuotaExceeded:
                continue
            account.close(20, used=20)
            given_out += 20
    assert given_out == pytest.approx(500 + 60 * 100, rel=0.02)
