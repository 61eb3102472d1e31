"""How much memory a graph needs, from shapes alone: the captured step is walked through tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from worker.caching_allocator import CachingPool, round_up
from worker.causal_lm import ModelShape
from worker.graphs.key import GraphKey

DEFAULT_BLOCK_SIZE = 16
NUM_WALKED_LAYERS = 2
"""Layers need the same memory one after the other; the second shows what the first leaves behind."""
NODES_OF_A_LAYER = 26
NODES_OF_A_STEP = 40
"""Besides its layers: embedding, rotary table, last norm, logits, greedy tokens."""
NODE_BYTES = 2750
"""Device memory of an executable graph, for each of its nodes; measured on an H200, over 45 graphs of Llama-3.2-1B."""
FLOAT_BYTES = torch.float32.itemsize
INDEX_BYTES = torch.int64.itemsize


def graph_bytes(key: GraphKey, shape: ModelShape, dtype: torch.dtype, *, block_size: int = DEFAULT_BLOCK_SIZE) -> int:
    """Device memory of the key's graph in a pool of its own, without its executable."""
    pool = CachingPool()
    walk_region(key, shape, dtype, pool, block_size=block_size)
    return pool.reserved_bytes


def executable_bytes(shape: ModelShape) -> int:
    """Device memory of one executable graph of this model, which lies outside the pool."""
    return NODE_BYTES * num_nodes(shape)


def num_nodes(shape: ModelShape) -> int:
    """About the number of operations of one step."""
    return shape.num_layers * NODES_OF_A_LAYER + NODES_OF_A_STEP


def walk_region(
    key: GraphKey, shape: ModelShape, dtype: torch.dtype, pool: CachingPool, *, block_size: int = DEFAULT_BLOCK_SIZE
) -> None:
    """Allocate and free in `pool` as the region of `key` does, and leave nothing allocated.

    Raises MemoryError where the pool has a limit that the region does not fit in.
    """
    width = round_up(key.tier, block_size)
    step = _Step(key.bucket, shape, dtype.itemsize, pool)
    if key.phase == "decode":
        table = width // block_size
        with pool.held(INDEX_BYTES * width, key.bucket * width, key.bucket * width):  # places, live, dead
            step.run(partial(_decode_attention, step, width, table), sampled=key.bucket)
    elif key.tier == 0:
        step.run(partial(_fresh_attention, step), sampled=1)
    else:
        with pool.held(INDEX_BYTES * width, width, key.bucket * width):  # places, dead, mask
            step.run(partial(_chunk_attention, step, width), sampled=1)


class _Step:
    """A forward pass over `tokens` tokens."""

    def __init__(self, tokens: int, shape: ModelShape, itemsize: int, pool: CachingPool) -> None:
        self.tokens = tokens
        self.shape = shape
        self.itemsize = itemsize
        self.pool = pool
        self.q_size = shape.num_heads * shape.head_dim
        self.kv_size = shape.num_kv_heads * shape.head_dim

    def of(self, width: int) -> int:
        """Bytes of [tokens, width] in the model's type."""
        return self.tokens * width * self.itemsize

    def run(self, attend: Callable[[], None], *, sampled: int) -> None:
        """The step, with the logits of `sampled` rows."""
        shape, angles = self.shape, self.tokens * self.shape.head_dim * FLOAT_BYTES
        with self.pool.held(self.of(shape.hidden_size)):  # the residual stream
            with self.pool.held(angles):  # rows of the rotary table, until they are spread
                pass
            with self.pool.held(angles, angles):
                for _ in range(min(NUM_WALKED_LAYERS, shape.num_layers)):
                    self._layer(attend)
            with self.pool.held(self.of(shape.hidden_size)):
                self._head(sampled)

    def _layer(self, attend: Callable[[], None]) -> None:
        hidden = self.of(self.shape.hidden_size)
        with self.pool.held(self.of(self.q_size + 2 * self.kv_size)):  # queries, keys, values
            with self.pool.held(hidden):
                self._turn()
            with self.pool.held(self.of(self.q_size + self.kv_size), hidden, self.of(self.q_size)):
                attend()
                with self.pool.held(hidden):  # of the output projection
                    pass
                self._feed_forward()

    def _turn(self) -> None:
        turned = self.tokens * (self.q_size + self.kv_size)
        with self.pool.held(turned * FLOAT_BYTES, turned * self.itemsize, turned * FLOAT_BYTES):
            pass

    def _feed_forward(self) -> None:
        size = self.shape.intermediate_size
        with self.pool.held(self.of(2 * size), self.of(size), self.of(self.shape.hidden_size)):
            pass

    def _head(self, rows: int) -> None:
        """Logits in the model's type, then in float32, then the greedy tokens."""
        logits = rows * self.shape.vocab_size
        converted = self.itemsize != FLOAT_BYTES
        with self.pool.held(*([logits * self.itemsize] if converted else []), logits * FLOAT_BYTES):
            with self.pool.held(rows * FLOAT_BYTES, rows * INDEX_BYTES, 2 * rows * INDEX_BYTES):
                pass


def _decode_attention(step: _Step, width: int, table: int) -> None:
    """Keys and values of every row gathered to the tier's width, and the mask as numbers."""
    gathered = step.of(width * step.kv_size)
    with step.pool.held(step.tokens * table * INDEX_BYTES):  # block tables as indices
        pass
    with step.pool.held(gathered, gathered, step.of(width), step.of(step.q_size)):
        pass


def _fresh_attention(step: _Step) -> None:
    """Keys and values repeated for every query head; causal, without a mask."""
    repeated = [step.of(step.q_size)] * 2 if step.q_size != step.kv_size else []
    with step.pool.held(*repeated, step.of(step.q_size), step.tokens * step.shape.num_heads * FLOAT_BYTES):
        pass


def _chunk_attention(step: _Step, width: int) -> None:
    """The sequence's keys and values gathered and repeated; a mask from every token to every place."""
    gathered, repeated = width * step.kv_size * step.itemsize, width * step.q_size * step.itemsize
    sizes = [gathered, gathered, *([repeated] * 2 if repeated != gathered else [])]
    with step.pool.held(*sizes, step.of(width), step.of(step.q_size)):
        pass
