from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.config import POLICY_NAMES
from cluster.router.policies import (
    POLICIES,
    Candidate,
    LeastOutstandingTokens,
    PrefixAffinity,
    TierFit,
    has_free_slot,
    scores,
    without_stragglers,
)
from cluster.router.want import MIN_PREFIX_TOKENS, PREFIX_TOKENS, Want, prefix_of, want_of
from protos import control_pb2
from protos import generation_pb2 as pb


def want(cost: int, length: int = 100, prefix: bytes = b"") -> Want:
    return Want(cost, length, prefix)


FULL, EAGER = control_pb2.GRAPH_READINESS_FULL, control_pb2.GRAPH_READINESS_EAGER


def test_the_replica_with_the_fewest_tokens_is_chosen() -> None:
    policy = LeastOutstandingTokens()
    candidates = [Candidate("a", 30), Candidate("b", 10), Candidate("c", 20)]
    assert [policy(candidates, want(5)) for _ in range(3)] == [1, 1, 1]


def test_what_other_routers_placed_counts_too() -> None:
    assert LeastOutstandingTokens()([Candidate("a", 0, foreign_tokens=500), Candidate("b", 100)], want(5)) == 1


def test_equal_replicas_take_turns() -> None:
    policy = LeastOutstandingTokens()
    chosen = [
        policy([Candidate("a", 1), Candidate("b", 1), Candidate("c", 9), Candidate("d", 1)], want(5)) for _ in range(6)
    ]
    assert sorted(chosen) == [0, 0, 1, 1, 3, 3]
    assert chosen[:3] == chosen[3:]


def test_an_idle_replica_with_graphs_is_preferred_to_an_idle_one_without() -> None:
    policy = LeastOutstandingTokens()
    assert {policy([Candidate("a", 0, 0, EAGER), Candidate("b", 0, 0, FULL)], want(10)) for _ in range(4)} == {1}


def test_a_replica_without_graphs_is_used_once_the_fast_one_is_busy_enough() -> None:
    assert LeastOutstandingTokens()([Candidate("a", 0, 0, EAGER), Candidate("b", 1000, 0, FULL)], want(10)) == 0


def test_a_straggler_is_passed_over_while_another_has_a_free_row() -> None:
    candidates = [Candidate("a", 0, slowness=5.0, num_free_rows=8), Candidate("b", 4000, num_free_rows=1)]
    assert without_stragglers(candidates, 1) == [1]
    assert without_stragglers(candidates, 2) == [0, 1]


def test_a_replica_that_is_held_up_is_passed_over_while_another_has_a_free_row() -> None:
    candidates = [Candidate("a", 0, num_free_rows=8), Candidate("b", 4000, num_free_rows=1)]
    assert without_stragglers(candidates, 1, held={0}) == [1]
    assert without_stragglers(candidates, 2, held={0}) == [0, 1]
    assert without_stragglers(candidates, 1, held={0, 1}) == [0, 1]


def test_stragglers_take_their_part_once_rows_are_short() -> None:
    full = [Candidate("a", 0, slowness=5.0), Candidate("b", 4000), Candidate("c", 4000)]
    assert without_stragglers(full, 1) == [0, 1, 2]
    assert LeastOutstandingTokens()(full, want(5)) == 0


def test_replicas_that_are_all_slow_or_hardly_slow_are_all_looked_at() -> None:
    assert without_stragglers([Candidate("a", 0, slowness=3.0, num_free_rows=4)], 1) == [0]
    hardly = [Candidate("a", 0, slowness=1.9, num_free_rows=4), Candidate("b", 0, num_free_rows=4)]
    assert without_stragglers(hardly, 1) == [0, 1]


@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), min_size=1, max_size=64),
    st.integers(1, 10_000),
)
def test_nobody_with_less_to_do_is_passed_over(loads: list[tuple[int, int]], cost: int) -> None:
    candidates = [Candidate(str(index), own, foreign, FULL) for index, (own, foreign) in enumerate(loads)]
    chosen = LeastOutstandingTokens()(candidates, want(cost))
    assert sum(loads[chosen]) == min(sum(load) for load in loads)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=200))
def test_placing_many_requests_keeps_replicas_within_one_request_of_each_other(costs: list[int]) -> None:
    policy, tokens = LeastOutstandingTokens(), [0, 0, 0, 0]
    for cost in costs:
        tokens[policy([Candidate(str(place), load) for place, load in enumerate(tokens)], want(cost))] += cost
    assert max(tokens) - min(tokens) <= max(costs)


@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 500), st.floats(1, 16)), min_size=1, max_size=32),
    st.integers(1, 10_000),
    st.binary(min_size=1, max_size=16),
    st.floats(1, 4),
)
def test_a_prefix_never_goes_to_a_replica_with_more_than_the_stated_factor_of_the_least_work(
    loads: list[tuple[int, int, float]], cost: int, prefix: bytes, bound: float
) -> None:
    candidates = [
        Candidate(str(index), own, foreign, FULL, slowness) for index, (own, foreign, slowness) in enumerate(loads)
    ]
    chosen = PrefixAffinity(bound)(candidates, want(cost, prefix=prefix))
    all_scores = scores(candidates, cost)
    assert all_scores[chosen] <= bound * min(all_scores)


@given(st.sets(st.text(min_size=1, max_size=8), min_size=2, max_size=16), st.binary(min_size=1, max_size=16))
def test_prompts_that_begin_alike_go_together_and_a_leaving_replica_moves_only_its_own(
    names: set[str], prefix: bytes
) -> None:
    ordered = sorted(names)
    policy, candidates = PrefixAffinity(), [Candidate(name, 0) for name in ordered]
    home = candidates[policy(candidates, want(10, prefix=prefix))].name
    backwards = candidates[::-1]
    assert backwards[policy(backwards, want(10, prefix=prefix))].name == home
    for gone in ordered:
        left = [one for one in candidates if one.name != gone]
        if gone != home:
            assert left[policy(left, want(10, prefix=prefix))].name == home


def test_prefixes_spread_over_idle_replicas() -> None:
    candidates = [Candidate(name, 0) for name in "abcd"]
    policy = PrefixAffinity()
    chosen = [policy(candidates, want(10, prefix=bytes([number]))) for number in range(1, 201)]
    assert min(chosen.count(index) for index in range(4)) > 25


def test_a_prompt_without_a_prefix_goes_where_there_is_least_to_do() -> None:
    assert PrefixAffinity()([Candidate("a", 9), Candidate("b", 1)], want(10)) == 1


tiers = st.tuples(*(st.integers(0, 3) for _ in range(4)))


@given(st.lists(st.tuples(st.integers(0, 1000), tiers, st.integers(0, 3)), min_size=1, max_size=16), st.integers(1, 80))
def test_tier_fit_takes_the_least_busy_replica_that_can_start_the_request_now(
    loads: list[tuple[int, tuple[int, ...], int]], length: int
) -> None:
    candidates = [
        Candidate(str(index), own, free_slots=tuple(zip((8, 16, 32, 64), free, strict=True)), num_placed_since=placed)
        for index, (own, free, placed) in enumerate(loads)
    ]
    chosen = candidates[TierFit()(candidates, want(5, length=length))]
    fitting = [one for one in candidates if has_free_slot(one, length)]
    assert not fitting or chosen in fitting
    assert chosen.outstanding_tokens == min(one.outstanding_tokens for one in fitting or candidates)


def test_a_slow_replica_gets_less_and_graph_readiness_is_not_counted_twice() -> None:
    assert LeastOutstandingTokens()([Candidate("slow", 10, slowness=5.0), Candidate("b", 40)], want(5)) == 1
    fast = Candidate("fast", 0, 0, FULL)
    assert scores([Candidate("a", 0, 0, EAGER, 5.0), fast], 10) == [50, 10]
    assert scores([Candidate("a", 0, 0, EAGER, 1.2), fast], 10) == [40, 10]
    assert scores([Candidate("a", 0, 0, EAGER, 5.0), Candidate("b", 0, 0, EAGER)], 10) == [50, 10]


def test_every_policy_of_the_command_line_can_be_made() -> None:
    for create in POLICIES.values():
        assert create(2.0)([Candidate("only", 5)], want(1, prefix=b"x")) == 0
    assert tuple(POLICIES) == POLICY_NAMES


def ids(*token_ids: int, **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids), **fields)  # type: ignore[arg-type]


def test_only_the_first_tokens_and_the_salt_make_the_prefix() -> None:
    start = range(PREFIX_TOKENS)
    assert prefix_of(ids(*start, 5)) == prefix_of(ids(*start, 6, 7)) != b""
    assert prefix_of(ids(*start)) != prefix_of(ids(*start, cache_salt="tenant"))
    assert prefix_of(ids(*start)) != prefix_of(ids(1, *start))
    assert prefix_of(ids(*start, use_prefix_cache=False)) == b""
    assert prefix_of(ids(*range(MIN_PREFIX_TOKENS - 1))) == b""
    assert prefix_of(ids(*range(MIN_PREFIX_TOKENS))) != b""
    assert prefix_of(ids(*start, cache_salt="s" * 256)) != b""


def test_texts_and_conversations_have_prefixes_too() -> None:
    assert prefix_of(pb.GenerateRequest(text="a" * 300)) == prefix_of(pb.GenerateRequest(text="a" * 400)) != b""
    assert prefix_of(pb.GenerateRequest(text="short")) == b""
    system = pb.ChatMessage(role="system", content="be brief " * 40)
    one, other = (pb.ChatMessage(role="user", content=word) for word in ("one", "other"))
    assert prefix_of(pb.ChatRequest(messages=[system, one])) == prefix_of(pb.ChatRequest(messages=[system, other]))
    assert prefix_of(pb.ChatRequest(messages=[one, one])) == b""


def test_a_request_of_several_choices_is_as_long_as_one_of_them() -> None:
    request = ids(1, 2, sampling=pb.SamplingParams(n=4))
    assert want_of(request, prompt_cost=2, answer_cost=40).length == 12
