from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.simulated_steps import BLOCK, LONGEST, SimulatedSteps, Tokens, cached_scheduler
from worker.prefix_cache import chain_link, chain_root
from worker.request import GenerateRequest
from worker.sequence import Sequence


def sequence(prompt: Tokens, max_tokens: int = 4, *, salt: str = "", use: bool = True, name: str = "r") -> Sequence:
    request = GenerateRequest(request_id=name, prompt_token_ids=prompt, cache_salt=salt, use_prefix_cache=use)
    return Sequence(request=request, index=0, max_tokens=max_tokens, arrival_s=0.0)


def digits(tokens: Tokens) -> int:
    return (sum(tokens) * 7 + len(tokens)) % 10


def simulation(**options: int) -> SimulatedSteps:
    max_ahead = options.pop("max_ahead", 0)
    return SimulatedSteps(cached_scheduler(**options), digits, max_ahead=max_ahead)


def hit(steps: SimulatedSteps, one: Sequence) -> int:
    steps.scheduler.add([one])
    steps.run()
    return one.num_cached_tokens


def test_an_identity_depends_on_every_token_before_it_their_order_and_the_salt() -> None:
    root = chain_root("")
    first = chain_link(root, (1, 2, 3, 4))
    variants = {
        chain_link(first, (5, 6, 7, 8)),
        chain_link(chain_link(root, (1, 2, 4, 3)), (5, 6, 7, 8)),
        chain_link(chain_link(root, (1, 2, 3)), (4, 5, 6, 7, 8)),
        chain_link(chain_link(chain_root("a"), (1, 2, 3, 4)), (5, 6, 7, 8)),
        chain_link(root, (1, 2, 3, 4, 5, 6, 7, 8)),
        chain_link(first, (5, 6, 7, 2**40)),
        first,
    }
    assert len(variants) == 7
    assert chain_link(first, [5, 6, 7, 8]) == chain_link(first, (5, 6, 7, 8))


def test_an_identity_costs_less_than_ten_microseconds() -> None:
    link, tokens = chain_root(""), list(range(1000, 1016))
    started = time.perf_counter()
    for _ in range(2000):
        link = chain_link(link, tokens)
    assert (time.perf_counter() - started) / 2000 < 10e-6


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_a_repeated_prompt_starts_at_its_last_whole_block_and_computes_at_least_one_token(
    blocks: int, offset: int
) -> None:
    steps, prompt = simulation(), tuple(range(blocks * BLOCK + offset))
    assert hit(steps, sequence(prompt)) == 0
    computed = steps.num_prefill_tokens
    expected = (len(prompt) - 1) // BLOCK * BLOCK
    assert hit(steps, sequence(prompt)) == expected
    assert steps.num_prefill_tokens - computed == len(prompt) - expected
    cache = steps.scheduler.prefix_cache
    assert cache is not None
    assert (cache.num_queried_tokens, cache.num_hit_tokens) == (2 * len(prompt), expected)


def test_a_next_turn_starts_behind_the_answer_of_the_last_one() -> None:
    steps, first = simulation(), sequence(tuple(range(10)), max_tokens=9)
    hit(steps, first)
    # The last token was never computed: 18 of 19 are in the pool, 16 of them in whole blocks.
    assert hit(steps, sequence((*first.token_ids, 77, 78, 79))) == 16


def test_salts_and_requests_that_opt_out_share_nothing() -> None:
    steps, prompt = simulation(), tuple(range(17))
    assert hit(steps, sequence(prompt, use=False)) == 0
    assert steps.scheduler.pool.num_cached == 0
    assert hit(steps, sequence(prompt, salt="a")) == 0
    assert hit(steps, sequence(prompt, salt="b")) == 0
    assert hit(steps, sequence(prompt)) == 0
    assert hit(steps, sequence(prompt, use=False)) == 0
    assert hit(steps, sequence(prompt, salt="a")) == 16


@pytest.mark.parametrize("max_ahead", [0, 1])
@pytest.mark.parametrize("max_segments", [1, 64])
def test_choices_of_one_prompt_compute_its_whole_blocks_once(max_ahead: int, max_segments: int) -> None:
    steps = simulation(max_ahead=max_ahead, max_segments=max_segments)
    choices = [sequence(tuple(range(30)), name=str(i)) for i in range(8)]
    steps.scheduler.add(choices)
    for _ in range(6):
        steps.step()
    shared = {tuple(one.block_table[:7]) for one in steps.scheduler.running}
    assert len(steps.scheduler.running) > 1
    assert len(shared) == 1
    steps.run()
    assert [one.num_cached_tokens for one in choices] == [0, *[28] * 7]
    assert steps.num_prefill_tokens == 30 + 7 * 2


def test_prompts_that_part_share_what_they_have_in_common() -> None:
    steps = simulation()
    system = tuple(range(12))
    users = [sequence((*system, *[50 + i] * 9), name=str(i)) for i in range(3)]
    steps.scheduler.add(users)
    steps.run()
    assert [one.num_cached_tokens for one in users] == [0, 12, 12]


def test_nobody_starts_from_blocks_whose_step_has_not_come_out_yet() -> None:
    steps, prompt = simulation(max_ahead=1, chunk=32), tuple(range(17))
    first, second = sequence(prompt, max_tokens=1, name="first"), sequence(prompt, name="second")
    steps.scheduler.add([first, second])
    steps.step()
    assert steps.scheduler.running == [first]
    assert steps.scheduler.pool.num_cached == 0
    steps.step()
    steps.step()
    assert second.num_cached_tokens == 16


def test_who_waits_for_a_sequence_that_comes_out_as_nan_computes_for_itself() -> None:
    steps, prompt = simulation(max_ahead=1), tuple(range(17))
    bad, good = sequence(prompt, name="bad"), sequence(prompt, name="good")
    steps.scheduler.add([bad, good])
    while steps.step(lambda one: one is bad):
        pass
    assert steps.finished == [good]
    assert good.num_cached_tokens == 0
    assert hit(steps, sequence(prompt)) == 16


def test_a_row_of_nan_takes_the_identity_from_all_its_blocks_and_leaves_them_to_who_holds_them() -> None:
    steps, prompt = simulation(), tuple(range(17))
    good, bad = sequence(prompt, max_tokens=30, name="good"), sequence(prompt, max_tokens=30, name="bad")
    steps.scheduler.add([good, bad])
    for _ in range(8):
        steps.step()
    shared = bad.block_table[:4]
    assert shared == good.block_table[:4]
    own = set(bad.block_table) - set(shared)
    assert set(steps.scheduler.finish_spoilt([bad])) == own
    assert all(steps.scheduler.pool.num_holders(block) == 1 for block in shared)
    late = sequence(prompt, name="late")
    assert hit(steps, late) == 0
    assert good in steps.finished


def test_a_waiting_sequence_preempted_before_its_nan_arrived_is_forgotten_too() -> None:
    steps, prompt = simulation(), tuple(range(17))
    one = sequence(prompt, max_tokens=20)
    steps.scheduler.add([one])
    for _ in range(3):
        steps.step()
    steps.scheduler._preempt(one)
    assert steps.scheduler.pool.num_cached == 4
    steps.scrub(one)
    assert steps.scheduler.pool.num_cached == 0


def test_a_preempted_sequence_comes_back_to_what_is_left_of_its_blocks() -> None:
    steps, one = simulation(chunk=32), sequence(tuple(range(17)), max_tokens=20)
    steps.scheduler.add([one])
    for _ in range(8):
        steps.step()
    assert one.length == 25
    steps.scheduler._preempt(one)
    before = steps.num_prefill_tokens
    steps.run()
    assert one in steps.finished
    assert one.num_preemptions == 1
    assert one.num_cached_tokens == 0  # of the client's prompt nothing was there
    assert steps.num_prefill_tokens == before  # 24 of 25 tokens were in whole blocks: it goes on decoding


def test_a_cancelled_sequence_gives_its_claim_up_and_the_next_one_starts() -> None:
    steps, prompt = simulation(chunk=4), tuple(range(33))
    first, second = sequence(prompt, name="first"), sequence(prompt, name="second")
    steps.scheduler.add([first, second])
    steps.step()
    assert steps.scheduler.running == [first]
    steps.scheduler.finish(first)
    steps.run()
    assert steps.finished == [second]


def test_cached_blocks_of_nobody_count_as_free_and_make_room() -> None:
    steps = simulation(num_blocks=17)
    for start in range(5):
        hit(steps, sequence(tuple(range(100 * start, 100 * start + 40)), name=str(start)))
    pool = steps.scheduler.pool
    assert pool.num_cached >= 10
    assert pool.num_free == pool.num_usable == 16
    assert [load.free_slots for load in steps.scheduler.tier_loads()] == [8, 4, 2, 1]
    assert hit(steps, sequence(tuple(range(63)), max_tokens=1)) == 0
    assert steps.finished[-1].num_preemptions == 0


def test_the_blocks_a_prompt_starts_with_are_not_evicted_to_make_room_for_its_rest() -> None:
    steps, prompt = simulation(num_blocks=17), tuple(range(24))
    hit(steps, sequence(prompt, max_tokens=1))
    hit(steps, sequence(tuple(range(200, 236)), max_tokens=1))
    assert steps.scheduler.pool.num_cached == 15
    assert hit(steps, sequence((*prompt, *range(300, 338)), max_tokens=2)) == 24


def test_prompt_chunks_are_short_while_rows_decode_and_begin_on_whole_blocks() -> None:
    steps = simulation(chunk=32, busy_chunk=8)
    steps.scheduler.add([sequence((1, 2, 3), max_tokens=30, name="old")])
    steps.step()
    steps.scheduler.add([sequence(tuple(range(45)), name="new")])
    counts = []
    for _ in range(14):
        batch = steps.scheduler.schedule()
        assert batch is not None
        if batch.phase == "prefill":
            counts.append((batch.segments[0].start, batch.num_tokens))
        steps._launch(batch)
        steps._collect(steps.under_way.popleft(), lambda _: False)
    assert counts == [(0, 8), (8, 8), (16, 8), (24, 8), (32, 8), (40, 5)]


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(17, 50),
    st.integers(1, 8),
    st.sampled_from([4, 7, 8, 20]),
    st.sampled_from([1, 64]),
    st.integers(0, 1),
)
def test_any_load_reads_only_its_own_tokens_and_leaves_nothing_behind(
    seed: int, num_blocks: int, max_batch: int, chunk: int, max_segments: int, max_ahead: int
) -> None:
    dice = random.Random(seed)
    steps = simulation(
        num_blocks=num_blocks, max_batch=max_batch, chunk=chunk, max_segments=max_segments, max_ahead=max_ahead
    )
    stems = [tuple(dice.choices(range(10), k=40)) for _ in range(2)]
    pending = [_visitor(dice, stems, str(number)) for number in range(25)]
    expected = {id(one): _alone(one) for one in pending}
    live: list[Sequence] = []
    cut = 0
    for _ in range(5_000):
        if pending and dice.random() < 0.3:
            live.append(pending.pop())
            steps.scheduler.add(live[-1:])
        live = [one for one in live if one not in steps.finished]
        if live and dice.random() < 0.03:
            steps.scheduler.finish(live.pop(dice.randrange(len(live))))
            cut += 1
        if live and dice.random() < 0.01:
            steps.scrub(live.pop(dice.randrange(len(live))))
            cut += 1
        if not steps.step() and not pending:
            break
    assert not pending
    assert len(steps.finished) == 25 - cut
    assert all(one.generated == expected[id(one)] for one in steps.finished)
    assert steps.scheduler.pool.num_free == steps.scheduler.pool.num_usable
    assert steps.scheduler.prefix_cache is not None
    assert not steps.scheduler.prefix_cache._claims


def _visitor(dice: random.Random, stems: list[Tokens], name: str) -> Sequence:
    """A prompt that begins like others do, and ends anywhere around a block's end."""
    stem = dice.choice(stems)[: dice.randint(1, 40)]
    prompt = stem + tuple(dice.choices(range(10), k=dice.choice([0, 0, 1, 5])))
    return sequence(
        prompt,
        dice.randint(1, LONGEST - len(prompt)),
        salt=dice.choice(["", "", "", "other"]),
        use=dice.random() < 0.9,
        name=name,
    )


def _alone(one: Sequence) -> list[int]:
    tokens = tuple(one.token_ids)
    for _ in range(one.max_tokens):
        tokens += (digits(tokens),)
    return list(tokens[one.num_prompt :])
