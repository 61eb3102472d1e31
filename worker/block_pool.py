"""Who holds which KV block. A block (elsewhere called a page) holds `block_size` consecutive tokens of a sequence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

PADDING_BLOCK = 0
"""Padding rows read and write this block; no sequence ever owns it."""


class BlockPool:
    """Counts the holders of blocks 1 .. num_blocks - 1; it never grows and never fails half-way.

    A block may be given an identity: what its tokens are. Such a block can be held by several sequences, and stays
    cached when nobody holds it any more, until its place is needed: the one that was released longest ago goes first.
    Each usable block is at any time held, or cached, or blank.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 2: block 0 is for padding")
        self.num_blocks = num_blocks
        self._blank = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_holders = [0] * num_blocks
        self._identities: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        self._num_reserved = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: blank ones, and cached ones that nobody holds."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that still have their identity."""
        return len(self._cached)

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can ever own."""
        return self.num_blocks - 1 - self._num_reserved

    def num_holders(self, block: int) -> int:
        """How many block tables it is in."""
        return self._num_holders[block]

    def reserve(self, count: int) -> list[int]:
        """Take `count` blocks out of the pool for good. Raises ValueError when there are fewer."""
        blocks = self.allocate(count)
        if blocks is None:
            raise ValueError(f"{count} blocks cannot be reserved of {self.num_free} that are free")
        self._num_reserved += count
        return blocks

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks without identity, or None and nothing changed when there are fewer."""
        if count > self.num_free:
            return None
        taken = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in taken:
            self._num_holders[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Become one more holder of blocks that have an identity."""
        for block in blocks:
            assert block in self._identities, f"block {block} is shared but has no identity"
            if not self._num_holders[block]:
                del self._cached[block]
            self._num_holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Stop holding `blocks`; the last is evicted before the first, which more sequences begin with.

        Each must be held: releasing twice would hand one block to two sequences.
        """
        for block in reversed(blocks):
            assert self._num_holders[block], f"block {block} is released but not owned"
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if block in self._identities:
                self._cached[block] = None
            else:
                self._blank.append(block)

    def find(self, identity: bytes) -> int | None:
        """The block with this identity."""
        return self._blocks.get(identity)

    def identify(self, block: int, identity: bytes) -> None:
        """Let others find a held block. The first of several equal ones keeps the identity."""
        assert self._num_holders[block], f"block {block} is identified but not owned"
        assert block not in self._identities, f"block {block} has an identity already"
        if identity not in self._blocks:
            self._blocks[identity] = block
            self._identities[block] = identity

    def forget(self, identity: bytes) -> None:
        """Let nobody find this block any more; its holders keep it."""
        block = self._blocks.pop(identity, None)
        if block is None:
            return
        del self._identities[block]
        if not self._num_holders[block]:
            del self._cached[block]
            self._blank.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._blocks[self._identities.pop(block)]
        return block
