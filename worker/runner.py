"""Runs one step of the model and chooses tokens. The eager runner; graph replay is another runner."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from worker.attention.decode import PagedDecodeAttention
from worker.attention.prefill import PagedPrefillAttention, PrefillSegment
from worker.batch import Batch
from worker.causal_lm import CausalLM
from worker.chooser import StepOutput, TokenChooser
from worker.inputs import DecodeInputs, PrefillInputs
from worker.kv_cache import KVCache
from worker.load import GraphReadiness
from worker.tiers import TierTable


class Runner(Protocol):
    """What the engine needs of a way to run steps."""

    max_prefill_segments: int
    """Sequences that one prefill step may serve."""

    @property
    def readiness(self) -> GraphReadiness:
        """How much of it replays graphs."""

    def run(self, batch: Batch) -> StepOutput:
        """Compute a step: write its keys and values, and choose the next tokens."""

    def prepare_next(self) -> bool:
        """Do one piece of what makes later steps faster; False when there is nothing left to do."""


class EagerRunner:
    """Launches every operation by itself, on any device. Decode is padded to the bucket, prefill is not padded."""

    max_prefill_segments = 64

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        tiers: TierTable,
        *,
        max_batch: int,
        prefill_chunk: int,
        eos_token_ids: Collection[int],
    ) -> None:
        device, block_size = kv_cache.storage.device, kv_cache.block_size
        self.model = model
        self.kv_cache = kv_cache
        self.tiers = tiers
        max_blocks = tiers.num_blocks(tiers.longest)
        self.decode_inputs = DecodeInputs(
            max_batch=max_batch, max_blocks=max_blocks, block_size=block_size, device=device
        )
        self.prefill_inputs = PrefillInputs(
            max_tokens=prefill_chunk, max_blocks=max_blocks, block_size=block_size, device=device
        )
        max_rows = max(max_batch, self.max_prefill_segments)
        self.chooser = TokenChooser(max_rows=max_rows, eos_token_ids=eos_token_ids, device=device)

    @property
    def readiness(self) -> GraphReadiness:
        """See Runner."""
        return GraphReadiness.EAGER

    def prepare_next(self) -> bool:
        """See Runner: there is nothing to prepare."""
        return False

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """See Runner."""
        logits = self._decode(batch) if batch.phase == "decode" else self._prefill(batch)
        segments = [segment for segment in batch.segments if segment.samples]
        if not segments:
            return StepOutput([], [], [])
        return self.chooser.choose(logits.float(), segments, "eager")

    def _decode(self, batch: Batch) -> torch.Tensor:
        """Logits [bucket, vocab]; rows past the batch are padding."""
        self.decode_inputs.fill(batch, batch.bucket)
        inputs, rows = self.decode_inputs.staging.device, slice(0, batch.bucket)
        # No wider than the longest row: a tier's full width is only needed where shapes are frozen.
        width = self.tiers.num_blocks(max(segment.end for segment in batch.segments))
        attention = PagedDecodeAttention(
            self.kv_cache,
            slots=inputs["slots"][rows],
            block_tables=inputs["block_tables"][rows, :width],
            context_lens=inputs["context_lens"][rows],
        )
        return self.model.compute(inputs["token_ids"][rows], inputs["positions"][rows], attention, None)

    def _prefill(self, batch: Batch) -> torch.Tensor:
        """Logits of the tokens that sample: [sampling segments, vocab]."""
        self.prefill_inputs.fill(batch, batch.num_tokens)
        inputs, tokens = self.prefill_inputs.staging.device, slice(0, batch.num_tokens)
        segments = self._prefill_segments(batch)
        attention = PagedPrefillAttention(self.kv_cache, slots=inputs["slots"][tokens], segments=segments)
        last = [
            placed.first + placed.count - 1
            for placed, segment in zip(segments, batch.segments, strict=True)
            if segment.samples
        ]
        sampled = torch.tensor(last, dtype=torch.int64, device=self.kv_cache.storage.device)
        return self.model.compute(inputs["token_ids"][tokens], inputs["positions"][tokens], attention, sampled)

    def _prefill_segments(self, batch: Batch) -> list[PrefillSegment]:
        placed, first, device = [], 0, self.kv_cache.storage.device
        for segment in batch.segments:
            table = segment.sequence.block_table[: self.tiers.num_blocks(segment.end)]
            blocks = torch.tensor(table, dtype=torch.int32, device=device)
            placed.append(PrefillSegment(first, segment.start, segment.count, blocks))
            first += segment.count
        return placed
