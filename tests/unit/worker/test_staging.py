from __future__ import annotations

import torch

from worker.batch import Batch, Segment
from worker.inputs import PrefillInputs
from worker.request import GenerateRequest
from worker.sampling import SamplingParams
from worker.scatter import Scatter
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


def test_scattered_changes_leave_their_neighbours_alone_however_many_there_are() -> None:
    staging = Staging({"table": ((3, 4), torch.int32), "other": ((3,), torch.int64)}, CPU)
    staging.device["table"].fill_(9)
    Scatter(staging, "table", capacity=2).write([1, 11, 4, 6, 0], [5, 6, 7, 8, 3])
    assert staging.device["table"].tolist() == [[3, 5, 9, 9], [7, 9, 8, 9], [9, 9, 9, 6]]
    assert staging.writable()["table"].tolist() == staging.device["table"].tolist()
    assert staging.device["other"].tolist() == [0, 0, 0]
