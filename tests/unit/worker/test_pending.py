from __future__ import annotations

import torch

from tests.fakes.sampled_rows import Rows, sequence
from worker.pending import TokenMailbox
from worker.sampler import NUM_DETAILS, sample
from worker.sampling import SamplingParams
from worker.sampling_needs import row_of

CPU = torch.device("cpu")


def mailbox(depth: int = 2) -> TokenMailbox:
    return TokenMailbox(max_rows=4, depth=depth, device=CPU)


def packed(*tokens: int) -> torch.Tensor:
    return torch.tensor([[token, 1] for token in tokens])


def test_likeliest_tokens_arrive_as_they_are() -> None:
    output = mailbox().open(torch.tensor([[7, 1], [8, 0], [9, 1]]), 2).send("graph").result()
    assert output.token_ids == [7, 8]
    assert output.is_finite == [True, False]
    assert output.logprobs == [None, None]
    assert output.runner == "graph"


def test_sampled_tokens_take_the_places_of_their_rows() -> None:
    letter = mailbox().open(packed(7, 8, 9), 3)
    rows = tuple(row_of(sequence(SamplingParams(seed=row)), row, row) for row in (2, 0))
    letter.overlay(rows, (torch.tensor([[50, 1], [60, 0], [99, 1]]), torch.zeros(3, NUM_DETAILS, dtype=torch.int64)))
    output = letter.send("eager").result()
    assert output.token_ids == [60, 8, 50]
    assert output.is_finite == [False, True, True]


def test_log_probabilities_come_with_the_rows_that_asked_for_them() -> None:
    asked = [sequence(SamplingParams(temperature=0.0, logprobs=count)) for count in (2, 0)]
    rows = Rows(asked, torch.randn(2, 30, generator=torch.Generator().manual_seed(0)))
    letter = mailbox().open(packed(1, 2, 3), 3)
    letter.overlay(rows.rows, sample(rows.logits, rows.views))
    output = letter.send("eager").result()
    found = [output.logprobs[row] for row in rows.order]
    assert found[0] is not None
    assert found[1] is not None
    assert [len(one.top) for one in found if one is not None] == [2, 0]
    assert found[0].token_id == output.token_ids[rows.order[0]] == found[0].top[0][0]
    assert output.logprobs[2] is None


def test_as_many_steps_as_the_mailbox_is_deep_may_be_unread() -> None:
    subject = mailbox(depth=2)
    first, second = (subject.open(packed(token), 1).send("eager") for token in (1, 2))
    assert second.result().token_ids == [2]
    assert first.result().token_ids == [1]
    subject.open(packed(3), 1).send("eager")
    assert first.result().token_ids == [3]  # read too late: its buffer belongs to the third
