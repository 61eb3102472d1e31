"""Which KV blocks are free. A block (elsewhere called a page) holds `block_size` consecutive tokens of one sequence."""

from __future__ import annotations

from collections.abc import Iterable

PADDING_BLOCK = 0
"""Padding rows read and write this block; no sequence ever owns it."""


class BlockPool:
    """A free list over blocks 1 .. num_blocks - 1; it never grows and never fails half-way."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 2: block 0 is for padding")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._owned = bytearray(num_blocks)
        self._num_reserved = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can ever own."""
        return self.num_blocks - 1 - self._num_reserved

    def reserve(self, count: int) -> list[int]:
        """Take `count` blocks out of the pool for good. Raises ValueError when there are fewer."""
        blocks = self.allocate(count)
        if blocks is None:
            raise ValueError(f"{count} blocks cannot be reserved of {self.num_free} that are free")
        self._num_reserved += count
        return blocks

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, or None and nothing changed when there are fewer."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._owned[block] = 1
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Each must be owned: releasing twice would hand one block to two sequences."""
        for block in blocks:
            assert self._owned[block], f"block {block} is released but not owned"
            self._owned[block] = 0
            self._free.append(block)
