"""A scheduler driven without a model: what every slot of the KV pool holds is written down and checked."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from worker.batch import Batch
from worker.block_pool import PADDING_BLOCK, BlockPool
from worker.prefix_cache import PrefixCache
from worker.scheduler import Scheduler
from worker.sequence import Sequence, SequenceState
from worker.tiers import BucketTable, TierTable, default_buckets

BLOCK = 4
LONGEST = 64

Tokens = tuple[int, ...]


def cached_scheduler(
    *, num_blocks: int = 65, max_batch: int = 8, chunk: int = 16, busy_chunk: int | None = None, max_segments: int = 64
) -> Scheduler:
    pool = BlockPool(num_blocks)
    return Scheduler(
        tiers=TierTable((8, 16, 32, LONGEST), BLOCK),
        buckets=BucketTable(default_buckets(max_batch)),
        prefill_buckets=BucketTable(default_buckets(chunk)),
        pool=pool,
        max_waiting=100,
        max_prefill_segments=max_segments,
        prefill_chunk_when_busy=busy_chunk,
        prefix_cache=PrefixCache(pool, BLOCK),
    )


class SimulatedSteps:
    """Runs steps up to `max_ahead` before they are read; `next_token` says what follows a sequence of tokens.

    A slot is filled by a step with all tokens up to its own: a row that would read anything else is an error.
    """

    def __init__(self, scheduler: Scheduler, next_token: Callable[[Tokens], int], *, max_ahead: int = 0) -> None:
        self.scheduler = scheduler
        self.next_token = next_token
        self.max_ahead = max_ahead
        self.slots: dict[tuple[int, int], Tokens] = {}
        self.under_way: deque[Batch] = deque()
        self.num_prefill_tokens = 0
        self.finished: list[Sequence] = []

    def step(self, spoil: Callable[[Sequence], bool] = lambda _: False) -> bool:
        """Launch the next step and read what is due; False when there is nothing at all to do."""
        batch = self.scheduler.schedule()
        if batch is not None:
            self._launch(batch)
        limit = self.max_ahead if batch is not None else 0
        if batch is None and not self.under_way:
            assert not self.scheduler.has_work, "nothing runs, nothing is under way, and there is work"
            return False
        while len(self.under_way) > limit:
            self._collect(self.under_way.popleft(), spoil)
        self.check()
        return True

    def run(self) -> None:
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("no end")

    def _launch(self, batch: Batch) -> None:
        self.under_way.append(batch)
        for segment in batch.segments:
            sequence, table = segment.sequence, segment.sequence.block_table
            tokens = tuple(sequence.token_ids)
            if sequence.num_in_flight:
                tokens += (self.next_token(tokens),)
            for place in range(segment.start):
                assert self.slots[table[place // BLOCK], place % BLOCK] == tokens[: place + 1]
            for place in range(segment.start, segment.end):
                assert self._is_unknown(table[place // BLOCK]), "a block that others can find is written"
                self.slots[table[place // BLOCK], place % BLOCK] = tokens[: place + 1]
            if batch.phase == "prefill":
                self.num_prefill_tokens += segment.count
            sequence.num_computed = segment.end
            sequence.num_in_flight += segment.samples

    def _collect(self, batch: Batch, spoil: Callable[[Sequence], bool]) -> None:
        for segment in batch.sampling:
            sequence = segment.sequence
            sequence.num_in_flight -= 1
            if sequence.state is SequenceState.FINISHED:
                continue
            if spoil(sequence):
                self.scrub(sequence)
                continue
            if segment.end >= sequence.confirm_from:
                self.scheduler.confirm(segment)
            sequence.token_ids.append(self.next_token(tuple(sequence.token_ids)))
            if sequence.num_generated >= sequence.max_tokens:
                self.scheduler.finish(sequence)
                self.finished.append(sequence)

    def scrub(self, sequence: Sequence) -> None:
        """The sequence has come out as NaN."""
        identities = list(sequence.identities)
        for block in self.scheduler.finish_spoilt([sequence]):
            for offset in range(BLOCK):
                self.slots.pop((block, offset), None)
        assert all(self.scheduler.pool.find(identity) is None for identity in identities)

    def _is_unknown(self, block: int) -> bool:
        return block not in self.scheduler.pool._identities

    def check(self) -> None:
        """What must hold between any two steps."""
        pool, running = self.scheduler.pool, self.scheduler.running
        tables = [sequence.block_table for sequence in running]
        held = Counter(block for table in tables for block in table)
        assert all(len(set(table)) == len(table) for table in tables)
        assert PADDING_BLOCK not in held
        assert all(pool.num_holders(block) == held[block] for block in range(1, pool.num_blocks))
        assert len(pool._blank) + pool.num_cached + len(held) == pool.num_usable
        assert {block: identity for identity, block in pool._blocks.items()} == pool._identities
        assert len(pool._blocks) == len(pool._identities)
        assert pool._cached.keys() == pool._identities.keys() - held.keys()
        assert not any(sequence.block_table for sequence in self.scheduler.waiting)
        assert self.scheduler.prefix_cache is not None
        claims = self.scheduler.prefix_cache._claims
        assert all(sequence in running and sequence.claim == claim for claim, sequence in claims.items())
