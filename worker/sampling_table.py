"""What sampling needs to know of each sequence, on the device: one seat a sequence, written when it sits down.

A step reads its rows' seats and moves them on by itself (next position, one more occurrence of the token), so that the
next step over the same rows needs nothing from the host. A row only names its seat: when rows change, tables stay.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import torch

from worker.mass import FRACTION_ONE
from worker.sampling import MAX_LOGIT_BIAS, SamplingParams
from worker.sampling_needs import SampledRow, needs_of, position_of
from worker.sampling_views import (
    LOG2_E,
    MAX_COUNT,
    NUM_PLACES,
    NUM_REAL,
    NUM_WHOLE,
    WORD_BITS,
    Real,
    SamplingViews,
    Whole,
)
from worker.sequence import Sequence, SequenceState
from worker.staging import Staging

LEAST_REPETITION_PENALTY = 1e-6
"""Dividing logits by less could overflow, which would look like a model that is broken."""


class SamplingTable:
    """Seats for the sequences of steps under way. What a seat holds is written once, on the stream of the steps."""

    def __init__(
        self, *, max_rows: int, vocab_size: int, eos_token_ids: Collection[int], last_tokens: torch.Tensor
    ) -> None:
        device, words = last_tokens.device, -(-vocab_size // WORD_BITS)
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.last_tokens = last_tokens
        self.num_uploads = 0
        spec = {
            "places": ((max_rows, NUM_PLACES), torch.int64),
            "whole": ((max_rows + 1, NUM_WHOLE), torch.int64),
            "real": ((max_rows + 1, NUM_REAL), torch.float32),
        }
        self.staging = Staging(spec, device)
        self.counts = torch.zeros(max_rows + 1, vocab_size, dtype=torch.int16, device=device)
        self.allowed = torch.zeros(max_rows + 1, words, dtype=torch.int32, device=device)
        self.banned = torch.zeros_like(self.allowed)
        self.bias_ids = torch.zeros(max_rows + 1, MAX_LOGIT_BIAS, dtype=torch.int32, device=device)
        self.bias = torch.zeros(max_rows + 1, MAX_LOGIT_BIAS, dtype=torch.float32, device=device)
        self._seats: dict[Sequence, int] = {}
        self._free = list(reversed(range(max_rows)))
        self._positions: npt.NDArray[np.int64] = np.zeros(max_rows + 1, dtype=np.int64)
        """Of each seat once the steps launched so far have run."""
        self._last: tuple[SampledRow, ...] = ()
        self._occupied: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """The seats of the last rows."""
        self._bucket = 0
        self.make_inert()

    def views(self, rows: int) -> SamplingViews:
        """For the first `rows` rows."""
        device = self.staging.device
        return SamplingViews(
            places=device["places"][:rows],
            whole=device["whole"],
            real=device["real"],
            counts=self.counts,
            allowed=self.allowed,
            banned=self.banned,
            bias_ids=self.bias_ids,
            bias=self.bias,
            last_tokens=self.last_tokens,
        )

    def make_inert(self) -> None:
        """Make every row a padding row: a step over them changes nothing. Seats stay as they are."""
        self._write_places((), self.max_rows)
        self.staging.upload()
        self._last, self._bucket = (), 0

    def forget(self) -> None:
        """Nothing in the tables counts any more: every sequence sits down again, with what the host knows of it."""
        self._seats, self._last, self._bucket = {}, (), 0
        self._free = list(reversed(range(self.max_rows)))

    def fill(self, rows: tuple[SampledRow, ...], bucket: int) -> None:
        """Seat `rows`, pad up to `bucket` rows, and upload what the device does not have.

        A sequence with a token in flight must be in the seat it had.
        """
        present = dict.fromkeys(row.sequence for row in rows)
        moved = [self._sit(sequence, present) for sequence in present]
        is_as_left = bucket == self._bucket and rows == self._last and not any(moved)
        if not is_as_left:
            self._write_places(rows, bucket)
            self.staging.upload()
            self.num_uploads += 1
            self._occupied = np.array([self._seats[row.sequence] for row in rows], dtype=np.int64)
        self._last, self._bucket = rows, bucket
        np.add.at(self._positions, self._occupied, 1)

    def _write_places(self, rows: tuple[SampledRow, ...], bucket: int) -> None:
        host = self.staging.writable()
        # The device has moved them on; the same numbers must go up again.
        host["whole"][:, Whole.POSITION] = self._positions
        host["places"][:bucket] = (0, 0, self.max_rows)
        for number, row in enumerate(rows):
            host["places"][number] = (row.logits, row.token, self._seats[row.sequence])

    def _sit(self, sequence: Sequence, present: Collection[Sequence]) -> bool:
        """Whether the sequence's seat had to be written."""
        seat = self._seats.get(sequence)
        if seat is not None and self._positions[seat] == position_of(sequence):
            return False
        assert not sequence.num_in_flight, "only the device knows the last token, and its seat is gone"
        if seat is None:
            seat = self._seats[sequence] = self._free_seat(present)
        self._write_seat(seat, sequence)
        return True

    def _free_seat(self, present: Collection[Sequence]) -> int:
        if self._free:
            return self._free.pop()
        gone = next(
            sequence
            for sequence in self._seats
            if sequence.state is not SequenceState.RUNNING and sequence not in present
        )
        return self._seats.pop(gone)

    def _write_seat(self, seat: int, sequence: Sequence) -> None:
        params, host = sequence.request.sampling, self.staging.writable()
        self._positions[seat] = position_of(sequence)
        host["whole"][seat, : Whole.NUM_LOGPROBS + 1] = _whole_numbers(sequence)
        host["real"][seat, : Real.FREQUENCY + 1] = _real_numbers(params)
        if params.has_penalties:
            self._write_counts(seat, sequence)
        if params.logit_bias:
            pairs = sorted(params.logit_bias.items())
            self._send(self.bias_ids[seat, : len(pairs)], np.array([i for i, _ in pairs], dtype=np.int32))
            self._send(self.bias[seat, : len(pairs)], np.array([value for _, value in pairs], dtype=np.float32))
        if params.allowed_token_ids:
            self._send(self.allowed[seat], self._mask(params.allowed_token_ids))
        if params.min_tokens:
            eos = () if params.ignore_eos else self.eos_token_ids
            self._send(self.banned[seat], self._mask((*params.stop_token_ids, *eos)))

    def _write_counts(self, seat: int, sequence: Sequence) -> None:
        prompt, generated = sequence.token_ids[: sequence.num_prompt], sequence.generated
        ids, numbers = np.unique(np.array(generated, dtype=np.int64), return_counts=True)
        values = dict(zip(ids.tolist(), (2 * np.minimum(numbers, MAX_COUNT)).tolist(), strict=True))
        for token_id in prompt:
            values[token_id] = values.get(token_id, 0) | 1
        self.counts[seat].zero_()
        index = self._send(None, np.array(list(values), dtype=np.int64))
        self.counts[seat].scatter_(0, index, self._send(None, np.array(list(values.values()), dtype=np.int16)))

    def _mask(self, token_ids: Collection[int]) -> npt.NDArray[np.int32]:
        bits = np.zeros(self.allowed.shape[1] * WORD_BITS, dtype=np.uint8)
        bits[list(token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _send(self, target: torch.Tensor | None, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """Queue a copy of `values` to the device: into `target`, or into a tensor of its own."""
        host = torch.from_numpy(values)
        if self.last_tokens.is_cuda:
            host = host.pin_memory()
        if target is None:
            return host.to(self.last_tokens.device, non_blocking=True)
        return target.copy_(host, non_blocking=True)


def _whole_numbers(sequence: Sequence) -> list[int]:
    params = sequence.request.sampling
    is_random = not params.is_greedy
    return [
        needs_of(sequence),
        max(params.top_k, 0) if is_random else 0,
        max(round(params.top_p * FRACTION_ONE), 1) if is_random else FRACTION_ONE,
        params.seed,
        sequence.index,
        position_of(sequence),
        params.min_tokens,
        len(params.logit_bias),
        -1 if params.logprobs is None else params.logprobs,
    ]


def _real_numbers(params: SamplingParams) -> list[float]:
    is_random = not params.is_greedy
    return [
        LOG2_E / params.temperature if is_random else LOG2_E,
        math.log2(params.min_p) if is_random and params.min_p > 0 else -math.inf,
        max(params.repetition_penalty, LEAST_REPETITION_PENALTY),
        params.presence_penalty,
        params.frequency_penalty,
    ]
