"""Counts steps and their time, and predicts how long the next one takes."""

from __future__ import annotations

from worker.batch import Batch
from worker.forecast import predict_ttft_s
from worker.load import GraphReadiness, LoadSnapshot, TierLoad

WEIGHT = 0.1
"""Of the newest step in the running means."""


FADING = 0.99
"""Of the longest step, with each later one: a slow start is forgotten after some hundred steps."""


class StepMeter:
    """Running means over recent steps; times in seconds."""

    def __init__(self) -> None:
        self.steps = 0
        self.graph_replays = 0
        self.decode_step_s: float | None = None
        self.prefill_token_s: float | None = None
        self.answer_tokens: float | None = None
        """Recent mean length of answers."""
        self._prefill_s = self._prefill_tokens = 0.0
        self._token_s: float | None = None
        self._longest_s: float | None = None

    def record(self, batch: Batch, runner: str, took_s: float) -> None:
        """Count one finished step."""
        self.steps += 1
        self._longest_s = max(took_s, (self._longest_s or 0.0) * FADING)
        self.graph_replays += runner == "graph"
        if batch.phase == "decode":
            self.decode_step_s = _mean(self.decode_step_s, took_s)
            self._token_s = _mean(self._token_s, took_s / len(batch.segments))
        else:
            self._note_prefill(batch.num_tokens, took_s)

    def _note_prefill(self, num_tokens: int, took_s: float) -> None:
        """A mean over tokens, not over steps: one of few tokens takes hardly less than one of many, and tells little."""
        self._prefill_s = (1 - WEIGHT) * self._prefill_s + took_s
        self._prefill_tokens = (1 - WEIGHT) * self._prefill_tokens + num_tokens
        self.prefill_token_s = self._prefill_s / self._prefill_tokens

    def finish(self, num_generated: int) -> None:
        """Count one complete answer."""
        self.answer_tokens = _mean(self.answer_tokens, num_generated)

    def predict_s(self, max_prefill_tokens: int) -> float | None:
        """How long the longest step may take that could come next; None before the first."""
        if self._longest_s is None:
            return None
        return max(self._longest_s, (self.prefill_token_s or 0.0) * max_prefill_tokens)

    def snapshot(
        self,
        *,
        running: int,
        waiting: int,
        max_rows: int,
        outstanding_tokens: int,
        waiting_prefill_tokens: int,
        tiers: tuple[TierLoad, ...],
        free_blocks: int,
        total_blocks: int,
        prefix_cache_queries: int,
        prefix_cache_hits: int,
        queue_age_s: float,
        readiness: GraphReadiness,
        preemptions: int,
        wasted_rows: int,
        predicted_step_s: float | None,
    ) -> LoadSnapshot:
        """The engine's numbers and these counters as one reading."""
        return LoadSnapshot(
            running=running,
            waiting=waiting,
            max_rows=max_rows,
            waiting_prefill_tokens=waiting_prefill_tokens,
            prefill_token_ms=1e3 * (self.prefill_token_s or 0.0),
            predicted_ttft_s=predict_ttft_s(
                num_ahead=waiting,
                # Whoever waits while rows are free waits for blocks, and so would a newcomer.
                num_free_rows=0 if waiting and running else max_rows - running,
                max_rows=running if waiting and running else max_rows,
                prefill_tokens=waiting_prefill_tokens,
                prefill_token_s=self.prefill_token_s or 0.0,
                decode_step_s=self.decode_step_s or 0.0,
                answer_tokens=self.answer_tokens or 0.0,
            ),
            predicted_step_s=predicted_step_s or 0.0,
            outstanding_tokens=outstanding_tokens,
            tiers=tiers,
            free_blocks=free_blocks,
            total_blocks=total_blocks,
            prefix_cache_queries=prefix_cache_queries,
            prefix_cache_hits=prefix_cache_hits,
            queue_age_s=queue_age_s,
            steps=self.steps,
            step_ms=1e3 * (self.decode_step_s or 0.0),
            tokens_per_s=0.0 if not (running and self._token_s) else 1 / self._token_s,
            readiness=readiness,
            graph_replays=self.graph_replays,
            eager_steps=self.steps - self.graph_replays,
            preemptions=preemptions,
            wasted_rows=wasted_rows,
        )


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)
