"""Random rows for the self-check of a sampling graph: every kind of choice, with padding that is inert or poisoned."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from worker.graphs.key import GraphKey
from worker.request import GenerateRequest
from worker.sampling import SamplingParams
from worker.sampling_needs import Need, SampledRow, row_of
from worker.sampling_table import SamplingTable
from worker.sequence import Sequence

CHECKED_ROWS = 32
_SPREAD = 3.0
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.5, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 3},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {0: 2.0}, "logprobs": 20},
    {"temperature": 1.0, "min_tokens": 5, "stop_token_ids": (0, 1)},
)


class SampleDraw:
    """Rows of all kinds over random logits. Takes the table's seats: sequences must sit down again afterwards."""

    def __init__(self, table: SamplingTable, logits: torch.Tensor, key: GraphKey, needs: Need) -> None:
        self.table = table
        self.needs = needs
        self.logits = logits
        self.key = key

    def __call__(self, generator: torch.Generator, poison: bool) -> int:
        """See worker.graphs.region.DrawInputs. Rows need no more than the graph offers."""
        valid = min(self.key.bucket // 2 + 1, CHECKED_ROWS)
        seed = int(torch.randint(2**31, (), generator=generator))
        on_device = torch.Generator(self.logits.device).manual_seed(seed)
        self.logits.fill_(torch.nan if poison else 0.0)
        self.logits[:valid].normal_(0.0, _SPREAD, generator=on_device)
        self.table.last_tokens[:valid].copy_(self.logits[:valid].argmax(dim=-1))
        self.table.forget()
        kinds = itertools.cycle(_KINDS)
        rows: list[SampledRow] = []
        while len(rows) < valid:
            made = row_of(self._sequence(next(kinds), len(rows), generator), len(rows), len(rows))
            if not made.needs & ~self.needs:
                rows.append(made)
        self.table.fill(tuple(rows), self.key.bucket)
        return valid

    def _sequence(self, kind: dict[str, Any], row: int, generator: torch.Generator) -> Sequence:
        ids = torch.randint(self.table.vocab_size, (8,), generator=generator).tolist()
        request = GenerateRequest(
            request_id=f"self-check {row}", prompt_token_ids=tuple(ids[:4]), sampling=SamplingParams(seed=row, **kind)
        )
        sequence = Sequence(request, 0, max_tokens=8, arrival_s=0.0)
        sequence.token_ids += ids[4:]
        return sequence
