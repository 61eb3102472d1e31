"""What a worker says about itself."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class GraphReadiness(enum.Enum):
    """How much of a worker runs from captured graphs."""

    EAGER = "eager"
    PARTIAL = "partial"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class TierLoad:
    """One sequence-length tier: its length in tokens, the sequences in it, the sequences that could start now."""

    tier: int
    running: int
    free_slots: int


@dataclass(frozen=True, slots=True, order=True)
class GraphUse:
    """One captured graph, by the parts of its key, and how often it was replayed since the start."""

    phase: str
    tier: int
    bucket: int
    variant: str
    replays: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSnapshot:
    """One reading of what a runner's graphs have done since the start; empty for a runner without graphs."""

    uses: tuple[GraphUse, ...] = ()
    """By key; a key that was never replayed is there with 0."""
    misses: tuple[tuple[str, int], ...] = ()
    """(reason, steps that ran eagerly for it)."""
    padding_rows: int = 0
    """Rows and prompt tokens computed only to fill a bucket."""
    quarantined: int = 0
    """Keys whose graph disagreed with eager execution."""
    dropped: int = 0
    """Keys that were given up, for lack of memory or because they cannot be captured."""
    pool_bytes: int = 0
    """Device memory of all graphs."""
    capture_s: float = 0.0
    """Spent warming up, capturing and checking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCheckSnapshot:
    """One reading of how a model's memory is checked for changes; all 0 where it is not."""

    passes: int = 0
    """Times that all of it was found as it was loaded."""
    checked_bytes: int = 0
    """Compared since the start."""
    watched_bytes: int = 0
    """Of one pass."""
    age_s: float = 0.0
    """Since the end of the last pass; before the first, since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSnapshot:
    """One consistent reading of an engine's load."""

    running: int = 0
    waiting: int = 0
    outstanding_tokens: int = 0
    tiers: tuple[TierLoad, ...] = ()
    free_blocks: int = 0
    """Cached blocks that no sequence holds are among them."""
    total_blocks: int = 0
    queue_age_s: float = 0.0
    steps: int = 0
    """Completed since start: the progress signal."""
    step_ms: float = 0.0
    """Recent mean time of a decode step."""
    tokens_per_s: float = 0.0
    readiness: GraphReadiness = GraphReadiness.EAGER
    graph_replays: int = 0
    eager_steps: int = 0
    prefix_cache_queries: int = 0
    """Tokens of all sequences that were started; of these, `prefix_cache_hits` were in the cache."""
    prefix_cache_hits: int = 0
    max_rows: int = 0
    """Sequences that can hold a row at once."""
    waiting_prefill_tokens: int = 0
    """Prompt tokens not computed yet, of sequences that wait or run."""
    prefill_token_ms: float = 0.0
    """Recent mean of the time a prompt token takes."""
    predicted_ttft_s: float = 0.0
    """Time to first token of a short prompt that came now."""
    step_age_s: float = 0.0
    """How long the step under way has been running; 0 = none is."""
    predicted_step_s: float = 0.0
    """How long a step may take; 0 = not known yet."""
    is_preparing: bool = False
    """Loading or capturing: steps may take longer."""
    preemptions: int = 0
    """Rows taken back from sequences because blocks had run out."""
    wasted_rows: int = 0
    """Rows computed for sequences that had ended by the time their token was read."""
    graphs: GraphSnapshot = GraphSnapshot()
    weights: WeightCheckSnapshot = WeightCheckSnapshot()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What does not change while an engine lives."""

    model: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tiers: tuple[int, ...]
    buckets: tuple[int, ...]
    dtype: str
    device: str
    has_tokenizer: bool
    has_chat_template: bool
    is_deterministic: bool = False
    """Equal sequences get bit-equal logits, whatever runs beside them."""
