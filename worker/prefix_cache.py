"""Finds the blocks that already hold the beginning of a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from hashlib import blake2b

from worker.block_pool import BlockPool
from worker.sequence import Sequence

DIGEST_BYTES = 32


def chain_root(salt: str) -> bytes:
    """What comes before the first block: prompts under different salts share nothing."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"prefix root").digest()


def chain_link(parent: bytes, token_ids: Items[int]) -> bytes:
    """Identity of a block: its tokens, and by way of `parent` all tokens before them."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


class PrefixCache:
    """Identities of full blocks, and who is about to compute which.

    A block gets its identity once a token that depends on all of it has come out finite, so that nobody ever shares
    what a failed step or a row of NaN left behind. Until then its sequence claims the first block that it computes, and
    others that need the same one wait in the queue: several choices of one request, or requests with one long system
    prompt, compute it once. Those who wait hold nothing, and a claim ends with its sequence's first token, its
    preemption or its end, so nobody waits for ever.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.num_queried_tokens = 0
        """Of prompts that were looked up when they started, those of preempted sequences included."""
        self.num_hit_tokens = 0
        self._claims: dict[bytes, Sequence] = {}

    def lookup(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest known chain its tokens start with; always leaves a token to compute."""
        found: list[int] = []
        for index in range(self._num_shareable(sequence)):
            block = self.pool.find(self._identity(sequence, index))
            if block is None:
                break
            found.append(block)
        return found

    def is_awaited(self, sequence: Sequence, num_found: int) -> bool:
        """Whether the block after the `num_found` known ones is being computed for another sequence."""
        return num_found < self._num_shareable(sequence) and self._identity(sequence, num_found) in self._claims

    def start(self, sequence: Sequence, num_found: int) -> None:
        """The sequence starts after `num_found` known blocks; what follows is its own to compute."""
        sequence.num_identified = num_found
        sequence.num_computed = num_found * self.block_size
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
        if sequence.request.use_prefix_cache:
            sequence.confirm_from = 0  # the first token ends a claim, even without a full block
            self.num_queried_tokens += sequence.length
            self.num_hit_tokens += sequence.num_computed
        if num_found < self._num_shareable(sequence):
            sequence.claim = self._identity(sequence, num_found)
            self._claims[sequence.claim] = sequence

    def confirm(self, sequence: Sequence, num_tokens: int) -> None:
        """A finite token came out after `num_tokens`: let others find the blocks that these fill.

        There is something to do once these have reached `sequence.confirm_from`.
        """
        for index in range(sequence.num_identified, num_tokens // self.block_size):
            self.pool.identify(sequence.block_table[index], self._identity(sequence, index))
            sequence.num_identified = index + 1
        sequence.confirm_from = (sequence.num_identified + 1) * self.block_size
        self._drop_claim(sequence)

    def leave(self, sequence: Sequence) -> None:
        """The sequence gives its blocks up, and with them what it was about to compute."""
        self._drop_claim(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Nobody may find any block of this sequence's tokens, whoever holds it."""
        for identity in sequence.identities:
            self.pool.forget(identity)

    def _num_shareable(self, sequence: Sequence) -> int:
        """Full blocks before its last token, which must be computed to get the next one."""
        return (len(sequence.token_ids) - 1) // self.block_size if sequence.request.use_prefix_cache else 0

    def _identity(self, sequence: Sequence, index: int) -> bytes:
        """Of its block `index`, all of whose tokens are known. Each is computed once, and only when it is needed."""
        known, size = sequence.identities, self.block_size
        while len(known) <= index:
            parent = known[-1] if known else chain_root(sequence.request.cache_salt)
            known.append(chain_link(parent, sequence.token_ids[len(known) * size : (len(known) + 1) * size]))
        return known[index]

    def _drop_claim(self, sequence: Sequence) -> None:
        if sequence.claim is not None:
            del self._claims[sequence.claim]
            sequence.claim = None
