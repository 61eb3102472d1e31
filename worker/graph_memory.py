"""How much memory a graph needs, from shapes alone: the captured step is walked through tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from worker.caching_allocator import CachingPool, round_up
from worker.causal_lm import ModelShape
from worker.graphs.key import GraphKey
from worker.inputs import MAX_PACKED
from worker.kernels.sampling_scratch import scratch_bytes
from worker.sampler import NUM_DETAILS

NUM_WALKED_LAYERS = 2
"""Layers need the same memory one after the other; the second shows what the first leaves behind."""
EXECUTABLE_BYTES = 660 << 10
"""Device memory of one executable graph, outside the pool; on an H200 about the same for 150 nodes and for 450."""
WORKSPACE_BYTES = 32 << 20
"""What matrix products take in each pool, for as long as a graph lives there; cuBLAS's choice on Hopper, 8 MiB before it."""
FLOAT_BYTES = torch.float32.itemsize
INDEX_BYTES = torch.int64.itemsize


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What the memory of a captured step depends on, besides its key."""

    shape: ModelShape
    dtype: torch.dtype
    block_size: int = 16
    fused: bool = False
    """Fused kernels compute attention and the small operations between matrix products."""
    workspace_bytes: int = WORKSPACE_BYTES

    def graph_bytes(self, key: GraphKey) -> int:
        """Device memory of the key's graph in a pool of its own, without its executable."""
        pool = CachingPool()
        self.walk(key, pool)
        return pool.reserved_bytes

    def walk(self, key: GraphKey, pool: CachingPool) -> None:
        """Allocate and free in `pool` as the region of `key` does, and leave nothing allocated.

        Raises MemoryError where the pool has a limit that the region does not fit in.
        """
        with pool.held(*([self.workspace_bytes] if self.workspace_bytes else [])):
            self._walk(key, _Step(key.bucket, self, pool))

    def _walk(self, key: GraphKey, step: _Step) -> None:
        width, pool = round_up(key.tier, self.block_size), step.pool
        if key.phase == "sample":
            step.sample(key.bucket, only_draws=key.variant == "draw")
            return
        if key.phase == "decode" and self.fused:
            step.run(step.nothing, sampled=key.bucket, widens=False)
        elif key.phase == "decode":
            with pool.held(INDEX_BYTES * width, key.bucket * width, key.bucket * width):  # places, live, dead
                step.run(partial(_decode_attention, step, width), sampled=key.bucket)
        elif key.tier == 0:
            step.run(partial(_fresh_attention, step), sampled=MAX_PACKED if key.variant == "packed" else 1)
        else:
            with pool.held(INDEX_BYTES * width, width, key.bucket * width):  # places, dead, mask
                step.run(partial(_chunk_attention, step, width), sampled=1)


def graph_bytes(key: GraphKey, shape: ModelShape, dtype: torch.dtype, *, fused: bool = False) -> int:
    """Device memory of one key's graph in a pool of its own."""
    return StepMemory(shape, dtype, fused=fused).graph_bytes(key)


class _Step:
    """A forward pass over `tokens` tokens."""

    def __init__(self, tokens: int, memory: StepMemory, pool: CachingPool) -> None:
        self.tokens = tokens
        self.shape = memory.shape
        self.itemsize = memory.dtype.itemsize
        self.block_size = memory.block_size
        self.pool = pool
        self.q_size = self.shape.num_heads * self.shape.head_dim
        self.kv_size = self.shape.num_kv_heads * self.shape.head_dim
        self.hidden = self.of(self.shape.hidden_size)
        self.qkv = self.of(self.q_size + 2 * self.kv_size)
        self._fused = memory.fused

    def of(self, width: int) -> int:
        """Bytes of [tokens, width] in the model's type."""
        return self.tokens * width * self.itemsize

    def nothing(self) -> None:
        """Attention that needs no memory besides its output."""

    def run(self, attend: Callable[[], None], *, sampled: int, widens: bool = True) -> None:
        """The step, with the logits of `sampled` rows; their copy in float32 may lie outside the pool."""
        layers = range(min(NUM_WALKED_LAYERS, self.shape.num_layers))
        with self.pool.held(self.hidden):  # the residual stream
            if self._fused:
                with self.pool.held(self.hidden):  # and its norm
                    for _ in layers:
                        self._fused_layer(attend)
            else:
                self._rotate_and_run(layers, attend)
            with self.pool.held(self.hidden):
                self._head(sampled, widens=widens)

    def sample(self, rows: int, *, only_draws: bool) -> None:
        """The stage after a step, over logits that lie outside the pool."""
        outputs = rows * (2 + NUM_DETAILS) * INDEX_BYTES
        logits = rows * self.shape.vocab_size
        fused = scratch_bytes(rows, self.shape.vocab_size) if self._fused else []
        single, double = (2, 3) if only_draws else (3, 5)
        sizes = fused or [logits * FLOAT_BYTES] * single + [logits * INDEX_BYTES] * double
        with self.pool.held(*sizes, outputs):
            pass

    def _rotate_and_run(self, layers: range, attend: Callable[[], None]) -> None:
        angles = self.tokens * self.shape.head_dim * FLOAT_BYTES
        with self.pool.held(angles):  # rows of the rotary table, until they are spread
            pass
        with self.pool.held(angles, angles):
            for _ in layers:
                self._layer(attend)

    def _layer(self, attend: Callable[[], None]) -> None:
        with self.pool.held(self.qkv):
            with self.pool.held(self.hidden):
                self._turn()
            with self.pool.held(self.of(self.q_size + self.kv_size), self.hidden, self.of(self.q_size)):
                attend()
                with self.pool.held(self.hidden):  # of the output projection
                    pass
                self._feed_forward()

    def _turn(self) -> None:
        turned = self.tokens * (self.q_size + self.kv_size)
        with self.pool.held(turned * FLOAT_BYTES, turned * self.itemsize, turned * FLOAT_BYTES):
            pass

    def _feed_forward(self) -> None:
        size = self.shape.intermediate_size
        with self.pool.held(self.of(2 * size), self.of(size), self.hidden):
            pass

    def _fused_layer(self, attend: Callable[[], None]) -> None:
        """Each product of the layer before lives until the same one of this layer takes its place."""
        gated = self.of(self.shape.intermediate_size)
        with self.pool.held(self.qkv, self.of(self.q_size), self.hidden, gated):
            with self.pool.held(self.qkv):
                pass
            attend()
            with self.pool.held(self.hidden):
                pass
            with self.pool.held(2 * gated, gated):
                pass

    def _head(self, rows: int, *, widens: bool) -> None:
        """Logits in the model's type, then in float32, then the greedy tokens."""
        logits = rows * self.shape.vocab_size
        is_converted = self._fused or self.itemsize != FLOAT_BYTES
        native = [logits * self.itemsize] if is_converted else []
        small = [rows * FLOAT_BYTES, rows * INDEX_BYTES, 2 * rows * INDEX_BYTES]
        wide = [logits * FLOAT_BYTES] if widens else []
        with self.pool.held(*native, *wide, *small):
            pass


def _decode_attention(step: _Step, width: int) -> None:
    """Keys and values of every row gathered to the tier's width, and the mask as numbers."""
    gathered = step.of(width * step.kv_size)
    with step.pool.held(step.tokens * (width // step.block_size) * INDEX_BYTES):  # block tables as indices
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
