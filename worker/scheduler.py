"""Continuous batching: which sequences run, and what the next step computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from worker.batch import Batch, Phase, Segment
from worker.block_pool import BlockPool
from worker.errors import QueueFull
from worker.load import TierLoad
from worker.policy import choose_phase, cut_chunk, group_tiers, may_admit, prefill_budget
from worker.prefix_cache import PrefixCache
from worker.request import Criticality, GenerateRequest
from worker.sequence import Sequence, SequenceState
from worker.tiers import BucketTable, TierTable
from worker.waiting_queue import WaitingQueue

StepCost = Callable[[int, int], float]
"""(tier, rows) -> what a decode step of that shape costs, in any unit."""
GROUPING_MARGIN = 0.25
"""What two batches in turn must save, by a cost that knows only of memory traffic: half of what it foretells came true."""


class Scheduler:
    """Of a class first come, first served, limited by rows and blocks; under pressure the youngest is preempted.

    It can not deadlock: the pool holds at least one sequence of the longest tier, preemption always spares the oldest
    one running, and what is waited for in the prefix cache is being computed by a sequence that runs.
    """

    def __init__(
        self,
        *,
        tiers: TierTable,
        buckets: BucketTable,
        prefill_buckets: BucketTable,
        pool: BlockPool,
        max_waiting: int,
        max_prefill_segments: int,
        packs_parts: bool = True,
        step_cost: StepCost | None = None,
        prefill_chunk_when_busy: int | None = None,
        prefix_cache: PrefixCache | None = None,
        mix_tenants: bool = True,
    ) -> None:
        if pool.num_usable < tiers.num_blocks(tiers.longest):
            raise ValueError(
                f"the KV pool has {pool.num_usable} blocks, one sequence of {tiers.longest} tokens needs "
                f"{tiers.num_blocks(tiers.longest)}: raise kv_cache_bytes or lower max_model_len"
            )
        self.tiers = tiers
        self.buckets = buckets
        self.prefill_buckets = prefill_buckets
        self.pool = pool
        self.max_waiting = max_waiting
        self.max_prefill_segments = max_prefill_segments
        self.packs_parts = packs_parts
        self.step_cost = step_cost
        """What decode steps cost by tier; None where a longer tier costs its short rows nothing."""
        self.prefill_chunk_when_busy = prefill_chunk_when_busy or prefill_buckets.largest
        self.prefix_cache = prefix_cache
        self.mix_tenants = mix_tenants
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.trial: GenerateRequest | None = None
        """The request whose sequences alone are in steps now."""
        self._last: Phase = "decode"
        self._is_long_turn = False

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running, even if only for a step under way."""
        return bool(self.waiting or self.running)

    def sequences(self) -> Iterator[Sequence]:
        """Everything that is not finished."""
        yield from self.running
        yield from self.waiting

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens still to be computed before those sequences that do not decode yet can."""
        return sum(sequence.num_uncomputed for sequence in self.sequences() if not sequence.is_decoding)

    def add(self, sequences: list[Sequence], *, is_first: bool = False, has_begun: bool = False) -> None:
        """Queue the choices of one request, all or none. Raises QueueFull.

        Before all others if `is_first`; if it `has_begun` elsewhere, before those of which nothing has begun.
        """
        if len(self.waiting) + len(sequences) > self.max_waiting:
            raise QueueFull(len(self.waiting), self.max_waiting)
        if is_first:
            self.waiting.add_first(sequences)
        elif has_begun:
            self.waiting.add_begun(sequences)
        else:
            self.waiting.add(sequences)

    def may_queue(self, criticality: Criticality, num_sequences: int, num_ahead: int = 0) -> bool:
        """Whether there is room for them, or less critical ones to give up; on any thread."""
        num_over = len(self.waiting) + num_ahead + num_sequences - self.max_waiting
        return num_over <= 0 or self.waiting.num_below(criticality) >= num_over

    def to_shed(self, criticality: Criticality, num_sequences: int) -> list[GenerateRequest]:
        """Less critical requests that must end so that these find room; none if there is room or too few of them."""
        num_over = len(self.waiting) + num_sequences - self.max_waiting
        return self.waiting.less_critical(criticality, num_over) if num_over > 0 else []

    @property
    def is_trial_over(self) -> bool:
        """Whether every sequence that is tried now has got the tokens of its trial, or has left."""
        return all(
            not sequence.is_on_trial or sequence.num_chosen_here >= sequence.request.trial_tokens
            for sequence in self._in_steps
        )

    def end_trial(self) -> None:
        """Let the request that is tried now run with all others."""
        for sequence in self.sequences():
            if sequence.request is self.trial:
                sequence.is_on_trial = False
        self.trial = None

    @property
    def _in_steps(self) -> list[Sequence]:
        """The running sequences that steps may compute now."""
        if self.trial is None:
            return self.running
        return [sequence for sequence in self.running if sequence.request is self.trial]

    def schedule(self) -> Batch | None:
        """The next step, or None when nothing can run. Blocks for its tokens are allocated."""
        self._admit()
        decoding, num_prefill = self._survey()
        num_decode = len(decoding)
        if self.step_cost is not None:
            decoding = self._turn(decoding, self.step_cost)
        phase = choose_phase(num_prefill=num_prefill, num_decode=num_decode, last=self._last)
        segments = self._decode_segments(decoding) if phase == "decode" else self._prefill_segments(num_decode)
        if not segments and num_prefill:  # every row was preempted to make room for those that prefill
            phase, segments = "prefill", self._prefill_segments(0)
        if not segments:
            return None
        self._last = phase
        tier = self.tiers.fit(max(start + count for _, start, count, _ in segments))
        if phase == "decode":
            return Batch(phase, tuple(segments), tier, self.buckets.fit(len(segments)))
        num_tokens = sum(segment.count for segment in segments)
        return Batch(phase, tuple(segments), tier, self.prefill_buckets.fit(num_tokens))

    def confirm(self, segment: Segment) -> None:
        """The step of `segment` chose a token from finite numbers: what it computed may be shared.

        Of use only from `sequence.confirm_from` on, so that nothing is done for most tokens of an answer.
        """
        # One that was preempted since has given its blocks up.
        if self.prefix_cache is not None and segment.sequence.state is SequenceState.RUNNING:
            self.prefix_cache.confirm(segment.sequence, segment.end)

    def finish_spoilt(self, sequences: list[Sequence]) -> list[int]:
        """Take sequences out whose blocks may hold NaN: nobody finds these again. Returns those that nobody holds."""
        blocks = {block for sequence in sequences for block in sequence.block_table}
        for sequence in sequences:
            if self.prefix_cache is not None:
                self.prefix_cache.forget(sequence)
            self.finish(sequence)
        return [block for block in blocks if not self.pool.num_holders(block)]

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state, and give up what it holds."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._free(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED

    def tier_loads(self) -> tuple[TierLoad, ...]:
        """For each tier: the sequences in it, and how many more could start now, by rows and by blocks."""
        in_tier = dict.fromkeys(self.tiers.lengths, 0)
        for sequence in self.running:
            in_tier[self.tiers.fit(min(sequence.length, self.tiers.longest))] += 1
        free_rows = max(self.buckets.largest - len(self.running) - len(self.waiting), 0)
        return tuple(
            TierLoad(length, in_tier[length], min(free_rows, self.pool.num_free // self.tiers.num_blocks(length)))
            for length in self.tiers.lengths
        )

    def _admit(self) -> None:
        """Move waiting sequences to running while there is a row, and blocks for all their tokens and one more."""
        while self.waiting and len(self.running) < self.buckets.largest:
            sequence = self.waiting.head
            if self.trial is not None and sequence.request is not self.trial:
                return
            if not self.mix_tenants and self._is_anothers(sequence):
                return  # when the rows that run have ended, it is this one's turn
            if sequence.num_in_flight:
                return  # preempted with a token under way: it must arrive before the prompt is computed again
            known = [] if self.prefix_cache is None else self.prefix_cache.lookup(sequence)
            if self.prefix_cache is not None and self.prefix_cache.is_awaited(sequence, len(known)):
                return
            num_new = self.tiers.num_blocks(min(len(sequence.token_ids) + 1, self.tiers.longest)) - len(known)
            num_revived = sum(not self.pool.num_holders(block) for block in known)
            if not may_admit(
                num_free=self.pool.num_free, num_new=num_new, num_revived=num_revived, num_running=len(self.running)
            ):
                return
            self.waiting.pop()
            self._start(sequence, known, num_new)

    def _is_anothers(self, sequence: Sequence) -> bool:
        """Whether what runs is of another tenant."""
        return any(row.request.cache_salt != sequence.request.cache_salt for row in self.running[:1])

    def _start(self, sequence: Sequence, known: list[int], num_new: int) -> None:
        self.pool.share(known)  # first, so that making room for the new ones does not evict them
        new = self.pool.allocate(num_new)
        assert new is not None
        sequence.block_table = known + new
        sequence.state = SequenceState.RUNNING
        self.running.append(sequence)
        if sequence.is_on_trial:
            self.trial = sequence.request
        if self.prefix_cache is not None:
            self.prefix_cache.start(sequence, len(known))

    def _prefill_segments(self, num_decode: int) -> list[Segment]:
        """The oldest sequences with uncomputed prompt, cut to the chunk size."""
        prefilling = [sequence for sequence in self._in_steps if not sequence.is_decoding]
        budget = prefill_budget(
            num_decode=num_decode,
            num_prompts=len(prefilling),
            num_waiting_tokens=sum(sequence.num_uncomputed for sequence in prefilling),
            chunk=self.prefill_buckets.largest,
            chunk_when_busy=self.prefill_chunk_when_busy,
        )
        segments: list[Segment] = []
        for sequence in prefilling[: self.max_prefill_segments]:
            count = cut_chunk(
                start=sequence.num_computed,
                remaining=sequence.num_uncomputed,
                budget=budget,
                block_size=self.tiers.block_size,
                is_first=not segments,
            )
            is_whole = sequence.num_computed == 0 and count == sequence.num_uncomputed
            if count == 0 or (segments and not is_whole and not self.packs_parts):
                break
            segments.append(Segment(sequence, sequence.num_computed, count, samples=count == sequence.num_uncomputed))
            budget -= count
            if not is_whole and not self.packs_parts:
                break
        return segments

    def _survey(self) -> tuple[list[Sequence], int]:
        """The sequences that the next decode step has use for, and how many still have prompt to compute.

        One pass that spells out is_decoding and is_complete: it runs in every step, for every row.
        """
        decoding: list[Sequence] = []
        num_prefill = 0
        for sequence in self._in_steps:
            length = len(sequence.token_ids) + sequence.num_in_flight
            num_generated = length - sequence.num_prompt
            if num_generated <= 0 or length - sequence.num_computed != 1:
                num_prefill += 1
            elif num_generated < sequence.max_tokens:
                decoding.append(sequence)
        return decoding, num_prefill

    def _turn(self, decoding: list[Sequence], step_cost: StepCost) -> list[Sequence]:
        """Those of `decoding` that decode next: all, or where that is cheaper the short and the long ones in turn."""
        tier_of = {sequence: self.tiers.fit(sequence.num_computed + 1) for sequence in decoding}
        groups = group_tiers(Counter(tier_of.values()), step_cost, margin=GROUPING_MARGIN)
        if len(groups) < 2:
            return decoding
        self._is_long_turn = not self._is_long_turn
        group = groups[self._is_long_turn]
        return [sequence for sequence in decoding if tier_of[sequence] in group]

    def _decode_segments(self, decoding: list[Sequence]) -> list[Segment]:
        """Every decoding sequence, each with a block for its next token; may preempt."""
        size, running = self.tiers.block_size, SequenceState.RUNNING
        for sequence in decoding:
            # It computes its last token, so it has as many tokens as computed ones and one more.
            if len(sequence.block_table) * size <= sequence.num_computed and sequence.state is running:
                self._ensure_block(sequence)
        return [Segment(sequence, sequence.num_computed, 1) for sequence in decoding if sequence.state is running]

    def _ensure_block(self, sequence: Sequence) -> None:
        """Give `sequence` room for one more token, at the cost of the youngest sequence, which may be itself."""
        while len(sequence.block_table) < self.tiers.num_blocks(sequence.length):
            blocks = self.pool.allocate(1)
            if blocks is not None:
                sequence.block_table += blocks
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue: its tokens are kept, their keys and values are computed again."""
        self.running.remove(sequence)
        self._free(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        sequence.state = SequenceState.WAITING
        self.waiting.add_first([sequence])
        self.num_preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        if self.prefix_cache is not None:
            self.prefix_cache.leave(sequence)
        self.pool.release(sequence.block_table)
        sequence.block_table = []
