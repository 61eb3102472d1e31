from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.router.policies import Candidate, LeastOutstandingTokens
from protos import control_pb2

FULL, EAGER = control_pb2.GRAPH_READINESS_FULL, control_pb2.GRAPH_READINESS_EAGER


def test_the_replica_with_the_fewest_tokens_is_chosen() -> None:
    policy = LeastOutstandingTokens()
    candidates = [Candidate("a", 30), Candidate("b", 10), Candidate("c", 20)]
    assert [policy(candidates, 5) for _ in range(3)] == [1, 1, 1]


def test_what_other_routers_placed_counts_too() -> None:
    assert LeastOutstandingTokens()([Candidate("a", 0, foreign_tokens=500), Candidate("b", 100)], 5) == 1


def test_equal_replicas_take_turns() -> None:
    policy = LeastOutstandingTokens()
    chosen = [policy([Candidate("a", 1), Candidate("b", 1), Candidate("c", 9), Candidate("d", 1)], 5) for _ in range(6)]
    assert sorted(chosen) == [0, 0, 1, 1, 3, 3]
    assert chosen[:3] == chosen[3:]


def test_an_idle_replica_with_graphs_is_preferred_to_an_idle_one_without() -> None:
    policy = LeastOutstandingTokens()
    assert {policy([Candidate("a", 0, 0, EAGER), Candidate("b", 0, 0, FULL)], 10) for _ in range(4)} == {1}


def test_a_replica_without_graphs_is_used_once_the_fast_one_is_busy_enough() -> None:
    assert LeastOutstandingTokens()([Candidate("a", 0, 0, EAGER), Candidate("b", 1000, 0, FULL)], 10) == 0


@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), min_size=1, max_size=64),
    st.integers(1, 10_000),
)
def test_nobody_with_less_to_do_is_passed_over(loads: list[tuple[int, int]], cost: int) -> None:
    candidates = [Candidate(str(index), own, foreign, FULL) for index, (own, foreign) in enumerate(loads)]
    chosen = LeastOutstandingTokens()(candidates, cost)
    assert sum(loads[chosen]) == min(sum(load) for load in loads)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=200))
def test_placing_many_requests_keeps_replicas_within_one_request_of_each_other(costs: list[int]) -> None:
    policy, tokens = LeastOutstandingTokens(), [0, 0, 0, 0]
    for cost in costs:
        tokens[policy([Candidate(str(place), load) for place, load in enumerate(tokens)], cost)] += cost
    assert max(tokens) - min(tokens) <= max(costs)
