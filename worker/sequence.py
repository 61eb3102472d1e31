"""The engine's side of one choice of one request."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field

from worker.request import FinishReason, GenerateRequest, Timings


class SequenceState(enum.Enum):
    """WAITING -> RUNNING -> FINISHED; preemption goes back from RUNNING to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One row's tokens and blocks. `token_ids` is the prompt followed by what was generated, here or before."""

    request: GenerateRequest
    index: int
    max_tokens: int
    """Resolved: never more than the context leaves."""
    arrival_s: float
    num_prompt: int = field(init=False)
    """Tokens of the prompt."""
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Leading tokens whose keys and values are in the pool, or will be once the steps under way have run."""
    num_in_flight: int = 0
    """Tokens of steps under way: chosen on the device, not yet known here. At most one."""
    block_table: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Leading tokens of the prompt whose keys and values were there before this sequence."""
    identities: list[bytes] = field(default_factory=list)
    """Of its first full blocks, as far as they were asked for; the tokens of a full block never change."""
    num_identified: int = 0
    """Leading blocks of the table that were given their identity, or had it."""
    confirm_from: int = sys.maxsize
    """Computed tokens from which on a finite token makes another block fit to share."""
    claim: bytes | None = None
    """Identity of the block that others wait for this sequence to compute."""
    sampling_needs: int = -1
    """What choosing its tokens takes, see worker.sampling_needs; negative until somebody asks."""
    state: SequenceState = SequenceState.WAITING
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    is_on_trial: bool = False
    """Until it has shown in steps of its own that it ends no worker."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = [*self.request.prompt_token_ids, *self.request.delivered_of(self.index)]
        self.num_prompt = len(self.request.prompt_token_ids)
        self.is_on_trial = self.request.is_trial

    @property
    def num_generated(self) -> int:
        """Tokens generated so far; also the position key of the next random number."""
        return len(self.token_ids) - self.num_prompt

    @property
    def generated(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt :]

    @property
    def length(self) -> int:
        """Tokens so far, with those under way."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be run through the model; 1 means: ready for a decode step."""
        return self.length - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether the next step of this sequence is a decode step."""
        return self.num_uncomputed == 1 and self.length > self.num_prompt

    @property
    def is_complete(self) -> bool:
        """Whether the steps under way bring all the tokens it may have."""
        return self.length - self.num_prompt >= self.max_tokens

    @property
    def num_chosen_here(self) -> int:
        """Tokens that this engine generated."""
        return self.num_generated - len(self.request.delivered_of(self.index))

    @property
    def outstanding_tokens(self) -> int:
        """Tokens this sequence may still cost: what is to prefill plus answer to generate."""
        num_prefill = self.num_prompt + len(self.request.delivered_of(self.index))
        return max(num_prefill - self.num_computed, 0) + max(self.max_tokens - self.num_generated, 0)

    def timings(self, now_s: float) -> Timings:
        """Seconds in each stage, for a sequence that ends now."""
        started = now_s if self.first_scheduled_s is None else self.first_scheduled_s
        first_token = now_s if self.first_token_s is None else self.first_token_s
        return Timings(queue_s=started - self.arrival_s, prefill_s=first_token - started, decode_s=now_s - first_token)
