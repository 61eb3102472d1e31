"""A runner that fails on purpose, around one that does not. Made only for a worker that allows faults."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from worker.batch import Batch, Segment
from worker.faults import Faults
from worker.kv_cache import KVCache
from worker.load import GraphReadiness, GraphSnapshot
from worker.pending import PendingStep
from worker.runner import Runner
from worker.step_output import StepOutput


class FaultyRunner:
    """See worker.runner.Runner; every step meets the faults that are armed."""

    def __init__(self, runner: Runner, kv_cache: KVCache, faults: Faults) -> None:
        self._runner = runner
        self._kv_cache = kv_cache
        self._faults = faults
        self.max_prefill_segments = runner.max_prefill_segments
        self.packs_parts = runner.packs_parts
        self.max_ahead = runner.max_ahead

    @property
    def readiness(self) -> GraphReadiness:
        """See Runner."""
        return self._runner.readiness

    def graph_snapshot(self) -> GraphSnapshot:
        """See Runner."""
        return self._runner.graph_snapshot()

    @property
    def num_to_prepare(self) -> int:
        """See Runner."""
        return self._runner.num_to_prepare

    def prepare_next(self) -> bool:
        """See Runner."""
        return self._runner.prepare_next()

    def can_overlap(self, batch: Batch) -> bool:
        """See Runner."""
        return self._runner.can_overlap(batch)

    def launch(self, batch: Batch) -> PendingStep:
        """See Runner."""
        self._faults.before_step([_row(segment) for segment in batch.segments])
        self._spoil(batch.segments)
        started_s = time.monotonic()
        step = self._runner.launch(batch)
        return _FaultyStep(step, self._faults, started_s)

    def _spoil(self, segments: Sequences[Segment]) -> None:
        """Write NaN where the last computed token of a row lies, in a block that no other row can hold."""
        size = self._kv_cache.block_size
        for segment in segments:
            if segment.start % size and self._faults.meets("nan", *_row(segment)):
                block = segment.sequence.block_table[segment.start // size]
                self._kv_cache.storage[:, :, block, segment.start % size - 1] = math.nan


@dataclass(frozen=True, slots=True)
class _FaultyStep:
    step: PendingStep
    faults: Faults
    started_s: float

    def result(self) -> StepOutput:
        self.faults.before_read()
        output = self.step.result()
        self.faults.after_step(time.monotonic() - self.started_s)
        return output


def _row(segment: Segment) -> tuple[Sequences[int], int]:
    sequence = segment.sequence
    return sequence.request.prompt_token_ids, sequence.length - sequence.num_prompt
