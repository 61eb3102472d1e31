"""Runs the steps of the model. The eager runner; graph replay is another runner."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from worker.attention.prefill import PrefillSegment
from worker.batch import Batch
from worker.causal_lm import CausalLM
from worker.decode_inputs import DecodeInputs
from worker.decode_step import decode_step
from worker.inputs import MAX_PACKED, PrefillInputs
from worker.kv_cache import KVCache
from worker.load import GraphReadiness, GraphSnapshot
from worker.pending import DoneStep, Letter, PendingStep, TokenMailbox
from worker.sampling_stage import SamplingStage
from worker.step_kernels import StepKernels, TorchKernels
from worker.step_output import StepOutput
from worker.tiers import TierTable

MAILBOX_DEPTH = 4


class Runner(Protocol):
    """What the engine needs of a way to run steps."""

    max_prefill_segments: int
    """Sequences that one prefill step may serve."""
    packs_parts: bool
    """Whether a prefill step of several sequences may hold parts of prompts; if not, only whole ones from the start."""
    max_ahead: int
    """Launched steps that may be unread while the next one is launched."""

    @property
    def readiness(self) -> GraphReadiness:
        """How much of it replays graphs."""

    def graph_snapshot(self) -> GraphSnapshot:
        """What its graphs have done since the start."""

    def can_overlap(self, batch: Batch) -> bool:
        """Whether `batch` can be launched while tokens of the step before are still on the device alone."""

    def launch(self, batch: Batch) -> PendingStep:
        """Start a step: it writes keys and values and chooses the next tokens, after all steps launched before."""

    @property
    def num_to_prepare(self) -> int:
        """Pieces of preparation that are left."""

    def prepare_next(self) -> bool:
        """Do one piece of what makes later steps faster; False when there is nothing left. No step may be unread."""


class EagerRunner:
    """Launches every operation by itself, on any device. Decode is padded to the bucket, prefill is not padded."""

    max_prefill_segments = 64
    packs_parts = True
    max_ahead = 0

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        tiers: TierTable,
        *,
        max_batch: int,
        prefill_chunk: int,
        eos_token_ids: Collection[int],
        kernels: StepKernels | None = None,
    ) -> None:
        device, block_size = kv_cache.storage.device, kv_cache.block_size
        self.model = model
        self.kv_cache = kv_cache
        self.tiers = tiers
        self.kernels: StepKernels = kernels or TorchKernels(kv_cache)
        max_blocks = tiers.num_blocks(tiers.longest)
        self.decode_inputs = DecodeInputs(
            max_batch=max_batch, max_blocks=max_blocks, block_size=block_size, device=device
        )
        self.prefill_inputs = PrefillInputs(
            max_tokens=prefill_chunk, max_blocks=max_blocks, block_size=block_size, device=device
        )
        max_rows = max(max_batch, self.max_prefill_segments)
        self.sampling = SamplingStage(
            self.kernels,
            max_rows=max_batch,
            vocab_size=model.shape.vocab_size,
            eos_token_ids=eos_token_ids,
            last_tokens=self.decode_inputs.last_tokens,
        )
        self.mailbox = TokenMailbox(max_rows=max_rows, depth=MAILBOX_DEPTH, device=device)

    @property
    def readiness(self) -> GraphReadiness:
        """See Runner."""
        return GraphReadiness.EAGER

    def graph_snapshot(self) -> GraphSnapshot:
        """See Runner: there are none."""
        return GraphSnapshot()

    def can_overlap(self, batch: Batch) -> bool:  # noqa: ARG002
        """See Runner: decode and sampling take what they need from the device; prefill needs no token in flight."""
        return True

    @property
    def num_to_prepare(self) -> int:
        """See Runner."""
        return 0

    def prepare_next(self) -> bool:
        """See Runner: there is nothing to prepare."""
        return False

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """See Runner."""
        logits, packed = self._decode(batch) if batch.phase == "decode" else self._prefill(batch)
        return self.choose(batch, logits, packed, "eager")

    def choose(self, batch: Batch, logits: torch.Tensor, packed: torch.Tensor, runner: str) -> PendingStep:
        """Tokens of a step from its outputs: the greedy ones as they are, the others chosen from the logits."""
        letter = self.open_letter(batch, packed)
        if letter is None:
            return DoneStep(StepOutput([], [], [], runner))
        rows = self.sampling.rows_of(batch)
        if rows:
            letter.overlay(rows, self.sampling(logits, rows))
        return letter.send(runner)

    def open_letter(self, batch: Batch, packed: torch.Tensor) -> Letter | None:
        """Send the likeliest tokens on their way, to the host and to the next step; None when there are none."""
        count = len(batch.sampling)
        if not count:
            return None
        if batch.phase == "prefill" and count <= MAX_PACKED:
            self.decode_inputs.note_prefill([segment.sequence for segment in batch.sampling], packed[:, 0])
        elif batch.phase == "prefill":
            self.decode_inputs.last_tokens[:count].copy_(packed[:count, 0])
        return self.mailbox.open(packed, count)

    def _decode(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        self.decode_inputs.fill(batch, batch.bucket)
        # No wider than the longest row: a tier's full width is only needed where shapes are frozen.
        width = self.tiers.num_blocks(max(segment.end for segment in batch.segments))
        return decode_step(self.model, self.kernels, self.decode_inputs.views(batch.bucket, width))

    def _prefill(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        self.prefill_inputs.fill(batch, batch.num_tokens)
        inputs, tokens = self.prefill_inputs.staging.device, slice(0, batch.num_tokens)
        segments = self._prefill_segments(batch)
        attention = self.kernels.segments(slots=inputs["slots"][tokens], segments=segments)
        last = [
            placed.first + placed.count - 1
            for placed, segment in zip(segments, batch.segments, strict=True)
            if segment.samples
        ]
        sampled = torch.tensor(last, dtype=torch.int64, device=self.kv_cache.storage.device)
        if not last:
            sampled = inputs["last"]  # nobody looks at the logits of a chunk that does not end its prompt
        return self.kernels.greedy(
            self.model.compute(inputs["token_ids"][tokens], inputs["positions"][tokens], attention, sampled)
        )

    def _prefill_segments(self, batch: Batch) -> list[PrefillSegment]:
        placed, first, device = [], 0, self.kv_cache.storage.device
        for segment in batch.segments:
            table = segment.sequence.block_table[: self.tiers.num_blocks(segment.end)]
            blocks = torch.tensor(table, dtype=torch.int32, device=device)
            placed.append(PrefillSegment(first, segment.start, segment.count, blocks))
            first += segment.count
        return placed
