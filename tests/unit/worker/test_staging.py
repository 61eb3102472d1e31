from __future__ import annotations

import numpy as np
import torch

from worker.batch import Batch, Segment
from worker.inputs import PrefillInputs, SamplingInputs
from worker.request import GenerateRequest
from worker.sampling import SamplingParams
from worker.sequence import Sequence
from worker.staging import Staging

CPU = torch.device("cpu")


def sequence(tokens: list[int], table: list[int], computed: int, **params: float) -> Sequence:
    request = GenerateRequest(
        request_id="r",
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
    )
    made = Sequence(request=request, index=0, max_tokens=9, arrival_s=0.0)
    made.block_table, made.num_computed = table, computed
    return made


def test_fields_keep_their_addresses_and_do_not_overlap() -> None:
    staging = Staging({"a": ((3,), torch.int64), "b": ((2, 5), torch.int32), "c": ((7,), torch.float32)}, CPU)
    addresses = {name: tensor.data_ptr() for name, tensor in staging.device.items()}
    for value, name in enumerate(staging.writable(), start=1):
        staging.writable()[name][...] = value
    staging.upload()
    assert {name: tensor.data_ptr() for name, tensor in staging.device.items()} == addresses
    assert [float(tensor.unique()) for tensor in staging.device.values()] == [1, 2, 3]
    assert all(pointer % 16 == addresses["a"] % 16 for pointer in addresses.values())


def test_prefill_tokens_lie_segment_after_segment_in_their_own_blocks() -> None:
    inputs = PrefillInputs(max_tokens=16, max_blocks=4, block_size=4, device=CPU)
    a, b = sequence(list(range(10, 16)), [2, 5], computed=0), sequence(list(range(20, 29)), [1, 7, 3], computed=5)
    inputs.fill(Batch("prefill", (Segment(a, 0, 6), Segment(b, 5, 4)), 16, 16), 12)
    device = {name: tensor[:10].tolist() for name, tensor in inputs.staging.device.items()}
    assert inputs.staging.device["slots"][10:12].tolist() == [0, 0]
    assert device["token_ids"] == [10, 11, 12, 13, 14, 15, 25, 26, 27, 28]
    assert device["positions"] == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert device["slots"] == [8, 9, 10, 11, 20, 21, 29, 30, 31, 12]


def test_sampling_rows_past_the_batch_are_neutral() -> None:
    inputs = SamplingInputs(max_batch=4, device=CPU)
    hot = Segment(sequence([1], [1], 0, temperature=2.0, top_k=5, top_p=0.5, min_p=0.1), 0, 1)
    inputs.fill([hot, hot, hot], 4)
    inputs.fill([hot], 4)
    device = inputs.staging.device
    assert device["temperature"].tolist() == [2.0, 0.0, 0.0, 0.0]
    assert device["top_k"].tolist() == [5, 0, 0, 0]
    np.testing.assert_allclose(device["top_p"].numpy(), [0.5, 1, 1, 1])
    assert device["uniform"].tolist()[1:] == [0.0, 0.0, 0.0]


def test_the_random_number_depends_on_seed_choice_and_place_alone() -> None:
    inputs = SamplingInputs(max_batch=4, device=CPU)
    one = Segment(sequence([1, 2, 3], [1], 2, seed=7), 2, 1)
    other = Segment(sequence([9, 9, 9, 9], [1], 3, seed=8), 3, 1)
    inputs.fill([one, other], 2)
    together = inputs.staging.device["uniform"].tolist()
    inputs.fill([one], 1)
    assert inputs.staging.device["uniform"].tolist()[0] == together[0]
    assert together[0] != together[1]
