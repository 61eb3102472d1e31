from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.graphs.dispatcher import Dispatcher, Miss, MissReason
from worker.graphs.key import GraphKey


def decode(tier: int, bucket: int, variant: str = "default") -> GraphKey:
    return GraphKey("decode", tier, bucket, variant)


def dispatcher_with(*keys: GraphKey, max_padding: float = float("inf")) -> Dispatcher:
    dispatcher = Dispatcher(max_padding=max_padding)
    for key in keys:
        dispatcher.add(key)
    return dispatcher


@pytest.mark.parametrize(
    ("field", "value"), [("phase", "training"), ("tier", -1), ("bucket", 0), ("variant", "")], ids=str
)
def test_a_key_refuses_values_that_name_no_graph(field: str, value: object) -> None:
    values: dict[str, object] = {"phase": "decode", "tier": 256, "bucket": 1, "variant": "greedy"} | {field: value}
    with pytest.raises(ValueError, match=field):
        GraphKey(**values)  # type: ignore[arg-type]


def test_the_smallest_bucket_at_the_smallest_tier_is_chosen() -> None:
    dispatcher = dispatcher_with(*(decode(t, b) for t, b in itertools.product((256, 1024), (1, 2, 8))))
    assert dispatcher.find("decode", 256, 1) == decode(256, 1)
    assert dispatcher.find("decode", 256, 3) == decode(256, 8)
    assert dispatcher.find("decode", 257, 2) == decode(1024, 2)


def test_a_tier_whose_large_buckets_are_missing_is_passed_over() -> None:
    dispatcher = dispatcher_with(decode(256, 1), decode(1024, 8))
    assert dispatcher.find("decode", 256, 4) == decode(1024, 8)


def test_phases_and_variants_do_not_mix() -> None:
    dispatcher = dispatcher_with(GraphKey("prefill", 256, 64, "greedy"))
    assert isinstance(dispatcher.find("decode", 256, 64, "greedy"), Miss)
    assert isinstance(dispatcher.find("prefill", 256, 64, "sample"), Miss)
    assert dispatcher.find("prefill", 256, 33, "greedy") == GraphKey("prefill", 256, 64, "greedy")


def test_every_captured_shape_is_found_by_its_own_numbers() -> None:
    keys = [GraphKey(p, t, b) for p, t, b in itertools.product(("prefill", "decode"), (256, 1024), (1, 4))]  # type: ignore[arg-type]
    dispatcher = dispatcher_with(*keys)
    for key in keys:
        assert dispatcher.dispatch(key.phase, key.tier, key.bucket) == key
    assert dict(dispatcher.replays) == dict.fromkeys(keys, 1)
    assert not dispatcher.misses


def test_misses_say_why_and_are_counted_by_reason() -> None:
    dispatcher = dispatcher_with(decode(256, 4))
    dispatcher.expect([decode(256, 8), decode(256, 4)])
    dispatcher.drop(decode(1024, 4), "out of memory")
    reasons = [
        dispatcher.dispatch("decode", 256, 8),
        dispatcher.dispatch("decode", 1024, 4),
        dispatcher.dispatch("decode", 1024, 16),
        dispatcher.dispatch("prefill", 256, 1),
    ]
    assert [miss.reason for miss in reasons if isinstance(miss, Miss)] == [
        MissReason.PENDING,
        MissReason.DROPPED,
        MissReason.NOT_PLANNED,
        MissReason.NOT_PLANNED,
    ]
    assert "out of memory" in reasons[1].detail  # type: ignore[union-attr]
    assert dict(dispatcher.misses) == {MissReason.PENDING: 1, MissReason.DROPPED: 1, MissReason.NOT_PLANNED: 2}


def test_a_quarantined_key_is_never_returned_and_its_batches_run_eagerly() -> None:
    dispatcher = dispatcher_with(decode(256, 4), decode(256, 8))
    dispatcher.quarantine(decode(256, 4), "differs by 3")
    found = dispatcher.dispatch("decode", 256, 3)
    assert isinstance(found, Miss)
    assert found.reason is MissReason.QUARANTINED
    assert "differs by 3" in found.detail
    assert dispatcher.find("decode", 256, 5) == decode(256, 8)
    assert dispatcher.captured == {decode(256, 8)}
    assert dict(dispatcher.quarantined) == {decode(256, 4): "differs by 3"}


def test_capturing_a_quarantined_key_again_brings_it_back() -> None:
    dispatcher = dispatcher_with(decode(256, 4))
    dispatcher.quarantine(decode(256, 4), "differs")
    dispatcher.add(decode(256, 4))
    assert dispatcher.find("decode", 256, 4) == decode(256, 4)


def test_a_dropped_key_is_gone() -> None:
    dispatcher = dispatcher_with(decode(256, 1), decode(256, 4))
    dispatcher.drop(decode(256, 4), "evicted")
    assert isinstance(dispatcher.find("decode", 256, 2), Miss)
    dispatcher.drop(decode(256, 1), "evicted")
    assert isinstance(dispatcher.find("decode", 256, 1), Miss)
    assert dispatcher.captured == frozenset()


def test_a_batch_that_would_be_mostly_padding_runs_eagerly() -> None:
    dispatcher = dispatcher_with(decode(256, 256), max_padding=4)
    found = dispatcher.find("decode", 256, 1)
    assert isinstance(found, Miss)
    assert found.reason is MissReason.TOO_MUCH_PADDING
    assert dispatcher.find("decode", 256, 64) == decode(256, 256)
    with pytest.raises(ValueError, match="max_padding"):
        Dispatcher(max_padding=0.5)


def test_padding_rows_are_counted() -> None:
    dispatcher = dispatcher_with(decode(256, 8))
    dispatcher.dispatch("decode", 256, 5)
    dispatcher.dispatch("decode", 256, 8)
    assert dict(dispatcher.padding_rows) == {decode(256, 8): 3}


@given(
    captured=st.sets(st.tuples(st.sampled_from([64, 256, 1024]), st.integers(1, 12)), max_size=12),
    bad=st.sets(st.tuples(st.sampled_from([64, 256, 1024]), st.integers(1, 12)), max_size=3),
    tier=st.integers(1, 1100),
    rows=st.integers(1, 14),
)
def test_dispatch_equals_a_search_through_all_keys(
    captured: set[tuple[int, int]], bad: set[tuple[int, int]], tier: int, rows: int
) -> None:
    dispatcher = dispatcher_with(*(decode(t, b) for t, b in captured))
    for t, b in bad & captured:
        dispatcher.quarantine(decode(t, b), "bad")
    fitting = sorted((t, b) for t, b in captured if t >= tier and b >= rows)
    found = dispatcher.find("decode", tier, rows)
    if fitting and fitting[0] not in bad:
        assert found == decode(*fitting[0])
    else:
        assert isinstance(found, Miss)
        assert found.reason is (MissReason.QUARANTINED if fitting else MissReason.NOT_PLANNED)
