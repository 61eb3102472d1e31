"""Rows that sample: sequences with tokens behind them, seated in a table, and logits for them."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import torch

from worker.request import GenerateRequest
from worker.sampling import SamplingParams
from worker.sampling_needs import needs_of_all, row_of
from worker.sampling_table import SamplingTable
from worker.sampling_views import SamplingViews
from worker.sequence import Sequence, SequenceState

EOS = (3,)


def sequence(params: SamplingParams, prompt: Items[int] = (1, 2, 5), generated: Items[int] = ()) -> Sequence:
    """A running sequence that has `generated` so far."""
    request = GenerateRequest(request_id="r", prompt_token_ids=tuple(prompt), sampling=params)
    made = Sequence(request=request, index=0, max_tokens=1 << 20, arrival_s=0.0)
    made.token_ids += generated
    made.state = SequenceState.RUNNING
    return made


class Rows:
    """A table with one seat a sequence, and rows of logits in another order than the rows."""

    def __init__(
        self, sequences: Items[Sequence], logits: torch.Tensor, *, bucket: int | None = None, seed: int = 0
    ) -> None:
        count = len(sequences)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        self.sequences = list(sequences)
        self.order = order
        self.logits = torch.empty_like(logits)
        self.logits[torch.tensor(order, device=logits.device)] = logits
        self.bucket = bucket or count
        self.table = SamplingTable(
            max_rows=self.bucket,
            vocab_size=logits.shape[1],
            eos_token_ids=EOS,
            last_tokens=torch.zeros(count + 1, dtype=torch.int64, device=logits.device),
        )
        greedy = logits.nan_to_num(nan=torch.inf).argmax(dim=-1)
        self.table.last_tokens[torch.tensor(order, device=logits.device)] = greedy
        self.rows = tuple(row_of(one, place, place) for one, place in zip(self.sequences, order, strict=True))
        self.table.fill(self.rows, self.bucket)
        self.needs = needs_of_all(self.rows)

    @property
    def views(self) -> SamplingViews:
        return self.table.views(self.bucket)

    def copy(self) -> SamplingViews:
        """Views of the same state in memory of its own."""
        views = self.views
        return SamplingViews(**{name: getattr(views, name).clone() for name in SamplingViews.__slots__})

    def tokens(self, last_tokens: torch.Tensor) -> list[int]:
        """The rows' tokens, in the order of the sequences."""
        return last_tokens[torch.tensor(self.order, device=last_tokens.device)].tolist()


def varied(params: SamplingParams, **changes: Any) -> SamplingParams:
    """`params` with other values."""
    return replace(params, **changes)
