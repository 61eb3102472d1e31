from __future__ import annotations

import torch

from worker.batch import Batch, Segment
from worker.decode_inputs import FROM_HOST, DecodeInputs
from worker.request import GenerateRequest
from worker.sequence import Sequence


def inputs() -> DecodeInputs:
    return DecodeInputs(max_batch=4, max_blocks=4, block_size=4, device=torch.device("cpu"))


def sequence(tokens: list[int], table: list[int], in_flight: int = 0) -> Sequence:
    request = GenerateRequest(request_id="r", prompt_token_ids=tuple(tokens))
    made = Sequence(request=request, index=0, max_tokens=9, arrival_s=0.0)
    made.block_table, made.num_in_flight = table, in_flight
    return made


def batch(*sequences: Sequence) -> Batch:
    return Batch("decode", tuple(Segment(one, one.length - 1, 1) for one in sequences), 16, len(sequences))


def state(subject: DecodeInputs, rows: int) -> dict[str, list[int]]:
    return {
        name: subject.staging.device[name][:rows].tolist() for name in ("token_ids", "positions", "live", "sources")
    }


def test_rows_hold_the_last_token_and_padding_rows_are_inert_after_any_batch() -> None:
    subject = inputs()
    for array in subject.staging.writable().values():
        array[...] = 77  # what a careless earlier step could have left
    subject.fill(batch(sequence([5, 6, 7, 8, 9], [3, 1])), 2)
    assert state(subject, 2) == {
        "token_ids": [9, 0],
        "positions": [4, 0],
        "live": [1, 0],
        "sources": [FROM_HOST, FROM_HOST],
    }
    assert subject.staging.device["block_tables"][:2].tolist() == [[3, 1, 0, 0], [0, 0, 0, 0]]


def test_a_sequence_in_flight_finds_its_token_in_the_row_it_had() -> None:
    subject = inputs()
    a, b, c = (sequence([i], [i]) for i in (1, 2, 3))
    subject.fill(batch(a, b, c), 4)
    for one in (a, b, c):
        one.num_in_flight = 1
    newcomer = sequence([9, 9], [4])
    subject.fill(batch(c, newcomer, a), 4)
    assert state(subject, 3)["sources"] == [2, FROM_HOST, 0]
    assert state(subject, 3)["token_ids"] == [0, 9, 0]


def test_the_token_of_a_prefill_in_flight_is_in_the_place_of_its_own() -> None:
    subject = inputs()
    fresh = sequence([1, 2, 3], [1])
    second = sequence([4, 5], [3])
    subject.note_prefill([fresh, second], torch.tensor([11, 12, 99]))
    fresh.num_in_flight = second.num_in_flight = 1
    other = sequence([7], [2])
    subject.fill(batch(other, second, fresh), 4)
    assert state(subject, 3)["sources"] == [FROM_HOST, 5, 4]
    assert subject.last_tokens[4:6].tolist() == [11, 12]


def test_nothing_is_uploaded_while_the_same_rows_go_on_in_flight() -> None:
    subject = inputs()
    a, b = sequence([1, 1], [1]), sequence([2, 2], [2])
    subject.fill(batch(a, b), 2)
    a.num_in_flight = b.num_in_flight = 1
    subject.fill(batch(a, b), 2)
    subject.fill(batch(a, b), 2)
    assert subject.num_uploads == 1  # a step leaves each row its own token and the next position


def test_a_new_block_another_order_or_a_token_from_the_host_is_uploaded() -> None:
    subject = inputs()
    a, b = sequence([1, 1], [1], in_flight=1), sequence([2, 2], [2], in_flight=1)
    subject._rows_of = {a: 0, b: 1}
    subject.fill(batch(a, b), 2)
    uploads = subject.num_uploads
    a.block_table.append(3)
    subject.fill(batch(a, b), 2)
    assert subject.num_uploads == uploads + 1
    b.num_in_flight = 0
    subject.fill(batch(a, b), 2)
    assert subject.num_uploads == uploads + 2
    b.num_in_flight = 1
    uploads = subject.num_uploads
    subject.fill(batch(b, a), 2)
    subject.fill(batch(b, a), 4)
    assert subject.num_uploads == uploads + 2


def test_new_blocks_of_rows_in_flight_are_added_to_what_the_device_has_moved_on() -> None:
    subject = inputs()
    a, b = sequence([1, 1], [1]), sequence([2, 2], [2])
    subject.fill(batch(a, b), 2)
    a.num_in_flight = b.num_in_flight = 1
    subject.staging.device["positions"][:2] += 1  # as the step itself does
    b.block_table += [7, 9]
    subject.fill(batch(a, b), 2)
    assert subject.staging.device["positions"][:2].tolist() == [2, 2]
    assert subject.staging.device["block_tables"][:2].tolist() == [[1, 0, 0, 0], [2, 7, 9, 0]]
