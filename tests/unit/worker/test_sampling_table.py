from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fakes.sampled_rows import EOS, sequence
from worker.sampling import SamplingParams
from worker.sampling_needs import Need, SampledRow, needs_of, row_of
from worker.sampling_table import SamplingTable
from worker.sampling_views import NUM_PLACES, Place, Whole
from worker.sequence import Sequence, SequenceState

VOCAB = 70


def table(max_rows: int = 3) -> SamplingTable:
    last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64)
    return SamplingTable(max_rows=max_rows, vocab_size=VOCAB, eos_token_ids=EOS, last_tokens=last_tokens)


def rows(*sequences: Sequence) -> tuple[SampledRow, ...]:
    return tuple(row_of(one, row, row) for row, one in enumerate(sequences))


def step(subject: SamplingTable, *sequences: Sequence, bucket: int = 3) -> None:
    """A step that stays in flight: the device counts it, the host does not have its tokens. The one before is read."""
    subject.fill(rows(*sequences), bucket)
    for row in range(len(sequences)):
        seat = int(subject.views(bucket).places[row, Place.SEAT])
        subject.views(bucket).whole[seat, Whole.POSITION] += 1
    for one in sequences:
        one.token_ids += [4] * one.num_in_flight
        one.num_in_flight = 1


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        ({"temperature": 0.0}, Need(0)),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.1, "min_p": 0.5}, Need(0)),
        ({"temperature": 0.5}, Need.RANDOM),
        ({"top_k": 5}, Need.RANDOM | Need.CUT),
        ({"top_p": 0.5, "min_p": 0.1}, Need.RANDOM | Need.CUT | Need.MIN_P),
        ({"temperature": 0.0, "logprobs": 0}, Need.LOGPROBS),
        ({"temperature": 0.0, "logit_bias": {1: 1.0}, "allowed_token_ids": (1, 2)}, Need.BIAS | Need.ALLOWED),
        ({"temperature": 0.0, "frequency_penalty": 0.1}, Need.PENALTY),
        ({"temperature": 0.0, "min_tokens": 1}, Need.BANNED),
    ],
)
def test_a_row_is_sampled_only_for_what_its_request_asks(params: dict[str, Any], needs: Need) -> None:
    assert needs_of(sequence(SamplingParams(**params))) == needs


def test_min_tokens_end_with_the_tokens_under_way() -> None:
    one = sequence(SamplingParams(temperature=0.0, min_tokens=3), generated=(1, 1))
    assert needs_of(one) == Need.BANNED
    one.num_in_flight = 1
    assert needs_of(one) == Need(0)


def test_steps_over_the_same_rows_upload_nothing() -> None:
    subject = table()
    a, b = sequence(SamplingParams(seed=1)), sequence(SamplingParams(seed=2))
    step(subject, a, b)
    uploads = subject.num_uploads
    for _ in range(4):
        step(subject, a, b)
    assert subject.num_uploads == uploads


def test_rows_that_change_places_keep_their_seats() -> None:
    subject = table()
    a, b = (sequence(SamplingParams(seed=seed, presence_penalty=0.5)) for seed in (1, 2))
    step(subject, a, b)
    seats = subject.views(3).places[:2, Place.SEAT].tolist()
    subject.counts[seats[0], 9] = 77
    step(subject, b, a)
    assert subject.views(3).places[:2, Place.SEAT].tolist() == seats[::-1]
    assert int(subject.counts[seats[0], 9]) == 77  # written once, though the row has moved
    assert subject.views(3).whole[seats, Whole.POSITION].tolist() == [2, 2]


def test_rows_past_the_batch_sit_where_nothing_is_needed() -> None:
    subject = table()
    made = [sequence(SamplingParams(seed=seed)) for seed in range(3)]
    subject.fill(rows(*made), 3)
    made[0].token_ids.append(4)
    subject.fill(rows(made[0]), 3)
    views = subject.views(3)
    assert views.places[1:].tolist() == [[0, 0, 3]] * 2
    assert not views.whole[3].any()


def test_a_sequence_that_ended_or_was_preempted_gives_its_seat_to_the_next() -> None:
    subject = table(max_rows=2)
    a, b, c = (sequence(SamplingParams(seed=seed)) for seed in range(3))
    subject.fill(rows(a, b), 2)
    b.state = SequenceState.FINISHED
    seat = int(subject.views(2).places[1, Place.SEAT])
    a.token_ids.append(0)
    subject.fill(rows(a, c), 2)
    assert subject.views(2).places[1, Place.SEAT] == seat
    assert int(subject.views(2).whole[seat, Whole.SEED]) == 2


def test_a_sequence_whose_tokens_have_moved_on_elsewhere_sits_down_again() -> None:
    subject = table()
    one = sequence(SamplingParams(frequency_penalty=0.5))
    subject.fill(rows(one), 1)
    one.token_ids += [6, 6]
    subject.fill(rows(one), 1)
    seat = int(subject.views(1).places[0, Place.SEAT])
    assert int(subject.views(1).whole[seat, Whole.POSITION]) == 2
    assert int(subject.counts[seat, 6]) == 4


def test_what_an_earlier_sequence_left_in_a_seat_does_not_count() -> None:
    subject = table(max_rows=1)
    first = sequence(SamplingParams(presence_penalty=0.5), prompt=(1, 1, 2), generated=(8, 8))
    subject.fill(rows(first), 1)
    assert {place: value for place, value in enumerate(subject.counts[0].tolist()) if value} == {1: 1, 2: 1, 8: 4}
    first.state = SequenceState.FINISHED
    subject.fill(rows(sequence(SamplingParams(presence_penalty=0.5), prompt=(5,))), 1)
    assert {place: value for place, value in enumerate(subject.counts[0].tolist()) if value} == {5: 1}


def test_a_sequence_in_flight_without_a_seat_is_a_fault_of_ours() -> None:
    subject = table()
    one = sequence(SamplingParams())
    one.num_in_flight = 1
    with pytest.raises(AssertionError):
        subject.fill(rows(one), 1)


def test_inert_rows_leave_seats_alone_and_forgotten_ones_are_written_again() -> None:
    subject = table()
    one = sequence(SamplingParams(repetition_penalty=1.5))
    subject.fill(rows(one), 1)
    subject.make_inert()
    assert subject.views(3).places.tolist() == [[0, 0, 3]] * 3
    subject.counts.zero_()
    one.token_ids.append(4)
    subject.fill(rows(one), 1)
    assert not subject.counts.any()
    subject.forget()
    one.token_ids.append(4)
    subject.fill(rows(one), 1)
    assert subject.counts.any()
    assert subject.staging.device["places"].shape == (3, NUM_PLACES)
