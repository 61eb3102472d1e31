"""Runs one step of the model and chooses tokens. The eager runner; graph replay is another runner."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.attention.decode import PagedDecodeAttention
from worker.attention.prefill import PagedPrefillAttention, PrefillSegment
from worker.batch import Batch, Segment
from worker.constraints import apply_constraints, needs_constraints
from worker.inputs import DecodeInputs, PrefillInputs, SamplingInputs
from worker.kv_cache import KVCache
from worker.model.decoder import Decoder
from worker.request import Logprob
from worker.sampler import greedy, sample
from worker.tiers import TierTable


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One entry for each segment of the batch that samples, in order."""

    token_ids: list[int]
    is_finite: list[bool]
    """False: the row's logits hold NaN or infinity, and its token means nothing."""
    logprobs: list[Logprob | None]
    runner: str = "eager"


class Runner(Protocol):
    """What the engine needs of a way to run steps."""

    max_prefill_segments: int
    """Sequences that one prefill step may serve."""

    def run(self, batch: Batch) -> StepOutput:
        """Compute a step: write its keys and values, and choose the next tokens."""


class EagerRunner:
    """Launches every operation by itself, on any device. Decode is padded to the bucket, prefill is not padded."""

    max_prefill_segments = 64

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        tiers: TierTable,
        *,
        max_batch: int,
        prefill_chunk: int,
        eos_token_ids: Collection[int],
    ) -> None:
        device, block_size = kv_cache.storage.device, kv_cache.block_size
        self.decoder = decoder
        self.kv_cache = kv_cache
        self.tiers = tiers
        self.eos_token_ids = eos_token_ids
        self.decode_inputs = DecodeInputs(
            max_batch=max_batch, max_blocks=tiers.num_blocks(tiers.longest), block_size=block_size, device=device
        )
        self.prefill_inputs = PrefillInputs(max_tokens=prefill_chunk, block_size=block_size, device=device)
        self.sampling_inputs = SamplingInputs(max_batch=max(max_batch, self.max_prefill_segments), device=device)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """See Runner."""
        hidden = self._decode(batch) if batch.phase == "decode" else self._prefill(batch)
        segments = [segment for segment in batch.segments if segment.samples]
        if not segments:
            return StepOutput([], [], [])
        return self._choose(self.decoder.logits(hidden).float(), segments)

    def _decode(self, batch: Batch) -> torch.Tensor:
        """Hidden states [bucket, hidden]; rows past the batch are padding."""
        self.decode_inputs.fill(batch)
        inputs, rows = self.decode_inputs.staging.device, slice(0, batch.bucket)
        # No wider than the longest row: a tier's full width is only needed where shapes are frozen.
        width = self.tiers.num_blocks(max(segment.end for segment in batch.segments))
        attention = PagedDecodeAttention(
            self.kv_cache,
            slots=inputs["slots"][rows],
            block_tables=inputs["block_tables"][rows, :width],
            context_lens=inputs["context_lens"][rows],
        )
        return self.decoder(inputs["token_ids"][rows], inputs["positions"][rows], attention)

    def _prefill(self, batch: Batch) -> torch.Tensor:
        """Hidden states of the tokens that sample: [sampling segments, hidden]."""
        self.prefill_inputs.fill(batch)
        inputs, tokens = self.prefill_inputs.staging.device, slice(0, batch.num_tokens)
        segments = self._prefill_segments(batch)
        attention = PagedPrefillAttention(self.kv_cache, slots=inputs["slots"][tokens], segments=segments)
        hidden = self.decoder(inputs["token_ids"][tokens], inputs["positions"][tokens], attention)
        last = [
            placed.first + placed.count - 1
            for placed, segment in zip(segments, batch.segments, strict=True)
            if segment.samples
        ]
        return hidden[torch.tensor(last, dtype=torch.int64, device=hidden.device)]

    def _prefill_segments(self, batch: Batch) -> list[PrefillSegment]:
        placed, first, device = [], 0, self.kv_cache.storage.device
        for segment in batch.segments:
            table = segment.sequence.block_table[: self.tiers.num_blocks(segment.end)]
            blocks = torch.tensor(table, dtype=torch.int32, device=device)
            placed.append(PrefillSegment(first, segment.start, segment.count, blocks))
            first += segment.count
        return placed

    def _choose(self, logits: torch.Tensor, segments: list[Segment]) -> StepOutput:
        """Sample the first `len(segments)` rows of [rows, vocab]; padding rows never reach the sampler."""
        count = len(segments)
        logits = logits[:count]
        raw = logits.clone() if any(s.sequence.request.sampling.logprobs is not None for s in segments) else logits
        for row, segment in enumerate(segments):
            if needs_constraints(segment.sequence):
                apply_constraints(logits[row], segment.sequence, self.eos_token_ids)
        is_finite = logits.amax(dim=-1).isfinite()
        if all(segment.sequence.request.sampling.is_greedy for segment in segments):
            tokens = greedy(logits)
        else:
            self.sampling_inputs.fill(segments, count)
            rows = {name: tensor[:count] for name, tensor in self.sampling_inputs.staging.device.items()}
            # A row without a finite maximum would draw out of range; it is reported, not used.
            tokens = sample(logits.masked_fill(~is_finite[:, None], 0.0), rows)
        token_ids = tokens.tolist()
        logprobs = [self._logprob(raw[row], s, token_ids[row]) for row, s in enumerate(segments)]
        return StepOutput(token_ids, is_finite.tolist(), logprobs)

    @staticmethod
    def _logprob(logits: torch.Tensor, segment: Segment, token_id: int) -> Logprob | None:
        """Of the model's own distribution, before temperature and constraints."""
        count = segment.sequence.request.sampling.logprobs
        if count is None:
            return None
        distribution = torch.log_softmax(logits, dim=-1)
        top = distribution.topk(count)
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return Logprob(token_id, distribution[token_id].item(), pairs)
