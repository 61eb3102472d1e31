from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.batch import Batch
from worker.block_pool import BlockPool
from worker.errors import QueueFull
from worker.policy import choose_phase
from worker.request import GenerateRequest
from worker.scheduler import Scheduler, StepCost
from worker.sequence import Sequence, SequenceState
from worker.tiers import BucketTable, TierTable, default_buckets

BLOCK = 4
LONGEST = 64


def scheduler(
    *,
    num_blocks: int = 65,
    max_batch: int = 8,
    chunk: int = 16,
    busy_chunk: int | None = None,
    max_waiting: int = 100,
    packs_parts: bool = True,
    step_cost: StepCost | None = None,
    mix_tenants: bool = True,
) -> Scheduler:
    return Scheduler(
        tiers=TierTable((8, 16, 32, LONGEST), BLOCK),
        buckets=BucketTable(default_buckets(max_batch)),
        prefill_buckets=BucketTable(default_buckets(chunk)),
        pool=BlockPool(num_blocks),
        max_waiting=max_waiting,
        max_prefill_segments=64,
        packs_parts=packs_parts,
        step_cost=step_cost,
        prefill_chunk_when_busy=busy_chunk,
        mix_tenants=mix_tenants,
    )


def sequence(prompt: int, max_tokens: int = 8, name: str = "r", tenant: str = "") -> Sequence:
    request = GenerateRequest(request_id=name, prompt_token_ids=tuple(range(prompt)), cache_salt=tenant)
    return Sequence(request=request, index=0, max_tokens=max_tokens, arrival_s=0.0)


def run(batch: Batch) -> list[Sequence]:
    """What the engine does after a step, without a model; returns the sequences that have all their tokens."""
    done = []
    for segment in batch.segments:
        samples = segment.samples
        segment.sequence.num_computed = segment.end
        if samples:
            segment.sequence.token_ids.append(1)
            if segment.sequence.num_generated == segment.sequence.max_tokens:
                done.append(segment.sequence)
    return done


def test_a_prompt_is_prefilled_then_decoded_to_its_last_token() -> None:
    subject, one = scheduler(), sequence(5, max_tokens=4)
    subject.add([one])
    phases = []
    while (batch := subject.schedule()) is not None:
        phases.append((batch.phase, batch.num_tokens, batch.tier, batch.bucket))
        for finished in run(batch):
            subject.finish(finished)
    assert phases == [("prefill", 5, 8, 8), ("decode", 1, 8, 1), ("decode", 1, 8, 1), ("decode", 1, 8, 1)]
    assert subject.pool.num_free == subject.pool.num_usable
    assert not subject.has_work


def test_a_long_prompt_is_cut_into_chunks_and_only_the_last_samples() -> None:
    subject, one = scheduler(chunk=16), sequence(40)
    subject.add([one])
    counts = []
    for _ in range(3):
        batch = subject.schedule()
        assert batch is not None
        counts.append((batch.num_tokens, batch.segments[0].samples))
        run(batch)
    assert counts == [(16, False), (16, False), (8, True)]


def test_short_prompts_share_a_prefill_step() -> None:
    subject = scheduler(chunk=16)
    subject.add([sequence(6, name="a"), sequence(6, name="b"), sequence(6, name="c")])
    batch = subject.schedule()
    assert batch is not None
    assert [segment.count for segment in batch.segments] == [6, 6, 4]


def test_a_runner_that_packs_whole_prompts_alone_gets_every_part_of_a_prompt_by_itself() -> None:
    subject = scheduler(packs_parts=False)
    subject.add([sequence(5, name="a"), sequence(6, name="b"), sequence(30, name="long"), sequence(4, name="c")])
    prefills = []
    while (batch := subject.schedule()) is not None:
        if batch.phase == "prefill":
            prefills.append([(segment.sequence.request.request_id, segment.count) for segment in batch.segments])
        for finished in run(batch):
            subject.finish(finished)
    assert prefills == [[("a", 5), ("b", 6)], [("long", 16)], [("long", 14)], [("c", 4)]]


def test_running_rows_decode_between_two_chunks_of_a_newcomer() -> None:
    subject = scheduler(chunk=16)
    subject.add([sequence(4, max_tokens=20, name="old")])
    first = subject.schedule()
    assert first is not None
    run(first)
    subject.add([sequence(48, name="new")])
    phases = []
    for _ in range(6):
        batch = subject.schedule()
        assert batch is not None
        phases.append(batch.phase)
        run(batch)
    assert phases == ["decode", "prefill", "decode", "prefill", "decode", "prefill"]


@pytest.mark.parametrize(("num_new", "counts"), [(5, [8, 8, 4]), (20, [32, 16, 16, 8, 8])])
def test_a_crowd_of_newcomers_is_computed_in_wider_chunks_that_narrow_as_it_is_served(
    num_new: int, counts: list[int]
) -> None:
    subject = scheduler(max_batch=32, chunk=64, busy_chunk=8)
    subject.add([sequence(4, max_tokens=30, name="old")])
    first = subject.schedule()
    assert first is not None
    run(first)
    subject.add([sequence(4, max_tokens=30, name=f"new{number}") for number in range(num_new)])
    steps = []
    for _ in range(2 * len(counts)):
        batch = subject.schedule()
        assert batch is not None
        steps.append((batch.phase, batch.num_tokens))
        run(batch)
    assert [tokens for phase, tokens in steps if phase == "prefill"] == counts
    assert [phase for phase, _ in steps] == ["decode", "prefill"] * len(counts)


def test_short_rows_decode_in_turn_with_long_ones_where_a_long_tier_is_dear() -> None:
    subject = scheduler(step_cost=lambda tier, rows: 100 + 1000 * tier * rows)
    subject.add([sequence(4, name="a"), sequence(5, name="b"), sequence(40, name="long")])
    steps = []
    while (batch := subject.schedule()) is not None:
        if batch.phase == "decode":
            steps.append(("".join(segment.sequence.request.request_id[0] for segment in batch.segments), batch.tier))
        for finished in run(batch):
            subject.finish(finished)
    assert all(names == ("ab" if tier < LONGEST else "l") for names, tier in steps)
    assert sum(names == "ab" for names, _ in steps) == sum(names == "l" for names, _ in steps) == 7
    both = steps[steps.index(("l", LONGEST)) : -1]
    assert all(one != other for one, other in itertools.pairwise(both) if ("ab", 8) in (one, other))


def test_all_rows_decode_together_where_weights_are_the_cost() -> None:
    subject = scheduler(step_cost=lambda tier, rows: 1e9 + tier * rows)
    subject.add([sequence(4, name="a"), sequence(40, name="long")])
    decodes = []
    while (batch := subject.schedule()) is not None:
        if batch.phase == "decode":
            decodes.append(len(batch.segments))
        for finished in run(batch):
            subject.finish(finished)
    assert 2 in decodes


def test_a_tier_is_the_smallest_that_fits_and_growth_moves_it_up() -> None:
    subject, one = scheduler(), sequence(7, max_tokens=30)
    subject.add([one])
    tiers = []
    while (batch := subject.schedule()) is not None:
        tiers.append(batch.tier)
        for finished in run(batch):
            subject.finish(finished)
    assert tiers == sorted(tiers)
    assert set(tiers) == {8, 16, 32, 64}


def test_rows_are_never_more_than_the_largest_bucket() -> None:
    subject = scheduler(max_batch=3)
    subject.add([sequence(2, name=str(i)) for i in range(7)])
    batch = subject.schedule()
    assert batch is not None
    assert len(subject.running) == 3
    assert len(subject.waiting) == 4


def test_a_full_queue_refuses_all_choices_of_a_request_or_none() -> None:
    subject = scheduler(max_waiting=3)
    subject.add([sequence(2), sequence(2)])
    with pytest.raises(QueueFull, match="limit is 3"):
        subject.add([sequence(2), sequence(2)])
    assert len(subject.waiting) == 2


def test_a_pool_too_small_for_one_longest_sequence_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="kv_cache_bytes"):
        scheduler(num_blocks=16)


def test_under_pressure_the_youngest_is_preempted_and_the_oldest_goes_on() -> None:
    subject = scheduler(num_blocks=17)
    old, young = sequence(20, max_tokens=40, name="old"), sequence(20, max_tokens=40, name="young")
    subject.add([old, young])
    finished: list[str] = []
    while (batch := subject.schedule()) is not None:
        for done in run(batch):
            subject.finish(done)
            finished.append(done.request.request_id)
    assert finished == ["old", "young"]
    assert young.num_preemptions > 0
    assert old.num_preemptions == 0
    assert subject.pool.num_free == subject.pool.num_usable


def test_free_slots_of_a_tier_are_limited_by_rows_and_by_blocks() -> None:
    subject = scheduler(num_blocks=33, max_batch=8)
    assert [(load.tier, load.free_slots) for load in subject.tier_loads()] == [(8, 8), (16, 8), (32, 4), (64, 2)]
    subject.add([sequence(30)])
    subject.schedule()
    assert [(load.running, load.free_slots) for load in subject.tier_loads()] == [(0, 7), (0, 6), (1, 3), (0, 1)]


@pytest.mark.parametrize(
    ("prefill", "decode", "last", "expected"),
    [
        (0, 3, "decode", "decode"),
        (0, 3, "prefill", "decode"),
        (2, 0, "prefill", "prefill"),
        (2, 3, "decode", "prefill"),
        (2, 3, "prefill", "decode"),
    ],
)
def test_two_prefill_steps_never_follow_each_other_while_rows_decode(
    prefill: int, decode: int, last: str, expected: str
) -> None:
    assert choose_phase(num_prefill=prefill, num_decode=decode, last=last) == expected  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(17, 60), st.integers(1, 9), st.integers(1, 24))
def test_any_load_ends_and_no_block_is_shared_or_lost(seed: int, num_blocks: int, max_batch: int, chunk: int) -> None:
    dice = random.Random(seed)
    subject = scheduler(num_blocks=num_blocks, max_batch=max_batch, chunk=chunk)
    pending = [sequence(p := dice.randint(1, LONGEST - 1), dice.randint(1, LONGEST - p), str(i)) for i in range(20)]
    live: list[Sequence] = []
    for _ in range(20_000):
        if pending and dice.random() < 0.3:
            live.append(pending.pop())
            subject.add(live[-1:])
        if live and dice.random() < 0.01:
            subject.finish(live.pop(dice.randrange(len(live))))
        batch = subject.schedule()
        if batch is None:
            assert not subject.has_work
            if not pending:
                break
            continue
        _check(subject, batch)
        for done in run(batch):
            subject.finish(done)
            live.remove(done)
    assert not pending
    assert not live
    assert subject.pool.num_free == subject.pool.num_usable


def _check(subject: Scheduler, batch: Batch) -> None:
    tables = [block for running in subject.running for block in running.block_table]
    assert len(tables) == len(set(tables))
    assert 0 not in tables
    assert len(batch.segments) <= subject.buckets.largest
    for segment in batch.segments:
        assert segment.sequence.state is SequenceState.RUNNING
        assert len(segment.sequence.block_table) * BLOCK >= segment.end
        assert segment.end <= batch.tier
        assert segment.start == segment.sequence.num_computed
    assert batch.num_tokens <= batch.bucket


@given(tenants=st.lists(st.sampled_from("abc"), min_size=1, max_size=12), num_blocks=st.integers(17, 65))
def test_tenants_that_are_kept_apart_are_never_in_one_batch_and_take_turns_in_order(
    tenants: list[str], num_blocks: int
) -> None:
    chosen = scheduler(mix_tenants=False, num_blocks=num_blocks)
    waiting = [sequence(5 + number, 6, str(number), tenant) for number, tenant in enumerate(tenants)]
    chosen.add(waiting)
    started: list[str] = []
    while (batch := chosen.schedule()) is not None:
        assert len({segment.sequence.request.cache_salt for segment in batch.segments}) == 1
        assert len({row.request.cache_salt for row in chosen.running}) == 1
        for segment in batch.segments:
            if segment.sequence.request.request_id not in started:
                started.append(segment.sequence.request.request_id)
        for done in run(batch):
            chosen.finish(done)
    assert started == [one.request.request_id for one in waiting]
    assert not chosen.has_work


def test_tenants_share_a_batch_unless_they_are_kept_apart() -> None:
    chosen = scheduler()
    chosen.add([sequence(5, 6, "1", "a"), sequence(6, 6, "2", "b")])
    chosen.schedule()
    assert len(chosen.running) == 2
