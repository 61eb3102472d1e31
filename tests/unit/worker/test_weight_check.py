"""Memory that changes by itself is found, whatever it holds; memory that is as it was never is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.fakes.script_runner import ManualClock
from tests.fakes.tiny_model import tiny_model
from worker import weight_check
from worker.bit_flips import BitFlips, flip_bit
from worker.config import WorkerConfig
from worker.constants import Constant, constants_of
from worker.errors import EngineDead, WeightsCorrupted
from worker.fingerprint import Fingerprint, Fingerprints, piece_words
from worker.weight_check import BUSY_SHARE, IDLE_SHARE, MAX_PIECES, SLICE_S, WeightCheck, weight_check_of

CPU = torch.device("cpu")
PRINTS = Fingerprints(CPU, max_pieces=4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8, torch.bool)


def fingerprint(words: torch.Tensor) -> Fingerprint:
    PRINTS.launch([words])
    taken = PRINTS.take()
    assert taken is not None
    return taken[0][0]


def signed(value: int) -> int:
    """Modulo 2**64, as torch shows it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def some_words(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)


class Holder(nn.Module):
    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def only(tensor: torch.Tensor) -> Constant:
    (constant,) = constants_of(Holder(weight=tensor))
    return constant


@pytest.mark.parametrize("count", [1, 2, 1000, piece_words(CPU)])
def test_the_sums_are_those_of_whole_numbers_and_the_same_each_time(count: int) -> None:
    words = some_words(count)
    values = words.tolist()
    expected = signed(sum(values)), signed(sum(place * value for place, value in enumerate(values, 1)))
    assert [fingerprint(words) for _ in range(3)] == [expected] * 3


def test_threads_change_no_sum() -> None:
    words, before = some_words(piece_words(CPU)), torch.get_num_threads()
    found = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.add(fingerprint(words))
    torch.set_num_threads(before)
    assert len(found) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (0, 3)], ids=str)
def test_every_bit_of_every_type_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    if not tensor.numel():
        assert constants_of(Holder(weight=tensor)) == []
        return
    constant = only(tensor)
    assert constant.nbytes == tensor.nbytes
    seen = {fingerprint(constant.words)}
    for bit in range(8 * tensor.nbytes):
        flip_bit(constant, bit)
        seen.add(fingerprint(constant.words))
        flip_bit(constant, bit)
    assert len(seen) == 1 + 8 * tensor.nbytes


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 32 * 500 - 1), min_size=1, max_size=2, unique=True), st.integers(0, 3))
def test_one_and_two_flipped_bits_always_show(bits: list[int], seed: int) -> None:
    constant = only(some_words(500, seed).view(torch.float32))
    before = fingerprint(constant.words)
    for bit in bits:
        flip_bit(constant, bit)
    assert fingerprint(constant.words) != before


def test_the_highest_bits_of_two_words_do_not_make_up_for_each_other() -> None:
    words = torch.tensor([-1, 0, 5, -1], dtype=torch.int32)
    before = fingerprint(words)
    for first in range(4):
        for second in range(first):
            changed = words.clone()
            changed[[first, second]] ^= -(1 << 31)
            assert fingerprint(changed) != before


def test_words_that_change_places_show() -> None:
    words = some_words(300)
    draw = random.Random(1)
    for _ in range(100):
        first, second = draw.sample(range(300), 2)
        changed = words.clone()
        changed[[first, second]] = words[[second, first]]
        assert fingerprint(changed) != fingerprint(words)


def test_a_model_is_all_there_once() -> None:
    module = tiny_model().model.module
    found = {one.name: one for one in constants_of(module)}
    assert "rope_table" in found
    assert "embedding" in found
    assert "lm_head" not in found  # tied
    tensors = [*module.parameters(), *module.buffers()]
    assert sum(one.nbytes for one in found.values()) == sum(tensor.nbytes for tensor in tensors)


def test_what_shares_memory_or_lies_otherwise_is_taken_as_it_is() -> None:
    matrix = torch.randn(6, 4)
    module = Holder(straight=matrix, turned=matrix.T, alone=torch.randn(3, 5).T)
    module.register_buffer("same", matrix)
    module.register_buffer("gaps", torch.randn(4, 4)[:, :2])
    module.register_buffer("spread", torch.zeros(1).expand(5))
    assert [one.name for one in constants_of(module)] == ["straight", "alone"]


def test_what_torch_writes_is_not_held_to_what_it_was() -> None:
    module = Holder(weight=torch.randn(8))
    module.register_buffer("constant", torch.randn(8))
    module.register_buffer("moving", torch.randn(8))
    with torch.inference_mode():
        module.register_buffer("unknown", torch.randn(8))
    check = WeightCheck(constants_of(module), interval_s=1e-9)
    watched = check.snapshot().watched_bytes
    assert watched == 3 * 32
    run_passes(check, 2)
    with torch.inference_mode():
        module.get_buffer("moving").add_(1)
    run_passes(check, 3)
    assert check.snapshot().watched_bytes == watched - 32
    flip_bit(next(one for one in constants_of(module) if one.name == "constant"), 7)
    with pytest.raises(WeightsCorrupted, match="constant"):
        run_passes(check, 2)


def test_a_weight_may_not_even_be_written_by_torch() -> None:
    module = Holder(weight=torch.randn(8))
    check = WeightCheck(constants_of(module), interval_s=1e-9)
    run_passes(check, 1)
    module.get_parameter("weight").mul_(2)
    with pytest.raises(WeightsCorrupted) as caught:
        run_passes(check, 1)
    assert caught.value.tensor == "weight"
    assert isinstance(caught.value, EngineDead)


def run_passes(check: WeightCheck, count: int) -> None:
    goal = check.snapshot().passes + count
    while check.snapshot().passes < goal:
        check.advance(has_work=False)


@pytest.mark.parametrize(
    "name", ["embedding", "layers.0.qkv_weight", "layers.1.input_norm", "final_norm", "rope_table"]
)
def test_a_flipped_bit_anywhere_is_found_in_the_next_pass_and_named(name: str) -> None:
    module = tiny_model().model.module
    check = weight_check_of(module, interval_s=1e-9)
    assert check is not None
    run_passes(check, 1)
    constant = next(one for one in constants_of(module) if one.name == name)
    flip_bit(constant, 8 * constant.nbytes - 1)
    with pytest.raises(WeightsCorrupted, match=f"{name} has changed"):
        run_passes(check, 1)


def test_the_first_pass_takes_what_it_finds() -> None:
    module = tiny_model().model.module
    check = WeightCheck(constants_of(module), interval_s=1e-9)
    flip_bit(constants_of(module)[0], 0)
    run_passes(check, 3)
    assert check.snapshot().checked_bytes == 3 * check.snapshot().watched_bytes


def test_bits_and_tensors_that_do_not_exist_are_refused_at_once() -> None:
    flips = BitFlips(Holder(weight=torch.zeros(2)), lambda _: pytest.fail("nothing is to happen"))
    for name, bit in (("weight", 64), ("weight", -1), ("other", 0)):
        with pytest.raises(ValueError, match=r"none of weight|outside of weight"):
            flips(name, bit)


def test_an_interval_of_zero_checks_nothing_and_one_that_is_no_time_is_refused() -> None:
    assert weight_check_of(tiny_model().model.module, interval_s=0) is None
    with pytest.raises(ValueError, match="nothing to check"):
        WeightCheck([], interval_s=1)
    for value in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="weight_check_interval_s"):
            WorkerConfig(weight_check_interval_s=value)


class SlowPrints:
    """Fingerprints of a device on which each piece takes `piece_s` of a manual clock, and lands when told to."""

    def __init__(self, clock: ManualClock, piece_s: float, *, is_landing_late: bool = False) -> None:
        self.clock, self.piece_s, self.is_landing_late = clock, piece_s, is_landing_late
        self.slices: list[tuple[float, int]] = []
        self.has_landed = not is_landing_late
        self._count = 0

    @property
    def is_under_way(self) -> bool:
        return self._count > 0

    def launch(self, pieces: Sequence[torch.Tensor]) -> None:
        assert self._count == 0
        self.slices.append((self.clock.now_s, len(pieces)))
        self._count = len(pieces)
        self.has_landed = not self.is_landing_late
        if not self.is_landing_late:
            self.clock.now_s += self._count * self.piece_s

    def take(self) -> tuple[list[Fingerprint], float] | None:
        if not self._count or not self.has_landed:
            return None
        count, self._count = self._count, 0
        return [(0, 0)] * count, count * self.piece_s


def paced(
    monkeypatch: pytest.MonkeyPatch, *, num_pieces: int, piece_s: float, interval_s: float = 60.0, **options: Any
) -> tuple[WeightCheck, SlowPrints, ManualClock]:
    clock = ManualClock()
    prints = SlowPrints(clock, piece_s, **options)
    monkeypatch.setattr(weight_check, "Fingerprints", lambda *_, **__: prints)
    monkeypatch.setattr(weight_check, "piece_words", lambda _: 1 << 14)
    constant = only(torch.zeros(num_pieces << 14))
    return WeightCheck([constant], interval_s=interval_s, clock=clock), prints, clock


def drive(check: WeightCheck, clock: ManualClock, seconds: float, *, has_work: bool, step_s: float = 0.01) -> None:
    """Steps of `step_s`, or sleeps as long as there is nothing to do."""
    end_s = clock.now_s + seconds
    while clock.now_s < end_s:
        check.advance(has_work=has_work)
        clock.now_s += step_s if has_work else max(1e-6, min(0.25, check.due_in_s(has_work=False)))


def test_an_idle_worker_is_held_up_by_no_more_than_a_slice_and_looks_once_an_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check, prints, clock = paced(monkeypatch, num_pieces=100, piece_s=0.0005)
    drive(check, clock, 200, has_work=False)
    assert check.snapshot().passes == 3  # and the first, which notes
    assert max(count for _, count in prints.slices) * prints.piece_s <= SLICE_S * 1.01
    starts = [prints.slices[0][0]]
    for at_s, _ in prints.slices:
        if at_s - starts[-1] > 30:
            starts.append(at_s)
    assert starts == pytest.approx([100, 160, 220, 280], abs=0.3)
    pass_s = [at_s for at_s, _ in prints.slices if at_s < 130]
    assert 100 * prints.piece_s / (pass_s[-1] - pass_s[0]) == pytest.approx(IDLE_SHARE, rel=0.15)


@pytest.mark.parametrize("piece_s", [0.00004, 0.002, 0.3])
def test_a_worker_that_is_never_idle_gives_a_thousandth_of_its_time_and_gets_round(
    monkeypatch: pytest.MonkeyPatch, piece_s: float
) -> None:
    check, prints, clock = paced(monkeypatch, num_pieces=20, piece_s=piece_s)
    drive(check, clock, max(200.0, 45 * piece_s / BUSY_SHARE), has_work=True)
    assert check.snapshot().passes >= 1
    assert {count for _, count in prints.slices} == {1}
    spent_s = sum(count for _, count in prints.slices[:-1]) * piece_s
    assert spent_s / (prints.slices[-1][0] - prints.slices[0][0]) <= BUSY_SHARE * 1.0001


def test_pieces_that_take_no_time_are_bounded_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    check, prints, clock = paced(monkeypatch, num_pieces=300, piece_s=1e-9)
    drive(check, clock, 1, has_work=False)
    assert max(count for _, count in prints.slices) == MAX_PIECES


def test_nothing_is_launched_behind_a_slice_that_has_not_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    check, prints, clock = paced(monkeypatch, num_pieces=4, piece_s=0.0001, is_landing_late=True)
    for _ in range(50):
        check.advance(has_work=True)
        clock.now_s += 1
    assert len(prints.slices) == 1
    assert 0 < check.due_in_s(has_work=False) < 0.01
    prints.has_landed = True
    check.advance(has_work=True)
    assert len(prints.slices) == 1  # a thousandth of the time
    clock.now_s += 1
    check.advance(has_work=True)
    assert len(prints.slices) == 2


def test_the_age_is_that_of_the_last_whole_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    check, _, clock = paced(monkeypatch, num_pieces=2, piece_s=0.001, interval_s=10)
    clock.now_s += 5
    assert check.snapshot().age_s == 5
    drive(check, clock, 25, has_work=False)
    assert check.snapshot().age_s < 10.3
    assert check.snapshot().checked_bytes == check.snapshot().passes * check.snapshot().watched_bytes > 0
