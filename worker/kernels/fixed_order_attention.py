"""Attention over the paged pool, one sum for each query whatever is asked beside it.

Keys are divided into splits of a fixed number of tokens from position 0 on. A split is folded tile by tile on its own, and
splits are merged one after the other. One program does all splits of some queries, or each split has a program of its own
and another kernel merges: the same operations in the same order. Queries of neighbouring tokens share a program only to
share what it reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker.kernels.attention_tiles import MIN_DOT
from worker.kernels.dependent_launch import trigger_next, wait_for_previous
from worker.kernels.device import launch_options, power_of_two

SPLIT_TOKENS = 256
"""Tokens of one split."""
_TILE_ELEMENTS = 4096
"""Numbers of one tile of keys."""
_LOWEST = tl.constexpr(-1e30)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryTables:
    """Where the rows of a step find their keys."""

    positions: torch.Tensor
    """[rows] int64."""
    block_tables: torch.Tensor
    """[rows, width] int32, rows maybe further apart than `width`; or [width], one for all rows, which are neighbours."""
    block_size: int
    """Tokens of one entry."""

    @property
    def is_one_sequence(self) -> bool:
        """Whether all rows share a table."""
        return self.block_tables.dim() == 1

    @property
    def num_splits(self) -> int:
        """Splits of the longest row there can be."""
        return -(-self.block_tables.shape[-1] * self.block_size // SPLIT_TOKENS)


class SplitWorkspace:
    """Room for the splits of `max_partials` pairs of a row and a key head, of sequences of up to `max_tokens` tokens.

    Launches that use it follow each other.
    """

    def __init__(self, *, max_partials: int, max_tokens: int, group: int, head_dim: int, device: torch.device) -> None:
        self.max_partials = max_partials
        self.num_splits = triton.cdiv(max_tokens, SPLIT_TOKENS)
        self.sums = torch.empty(max_partials, self.num_splits, group, head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(max_partials, self.num_splits, group, 2, dtype=torch.float32, device=device)


@triton.jit
def _merge_split(
    highest: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    split_highest: tl.tensor,
    split_total: tl.tensor,
    split_acc: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    higher = tl.maximum(highest, split_highest)
    fade, share = tl.exp2(highest - higher), tl.exp2(split_highest - higher)
    total = total * fade + split_total * share
    acc = acc * fade[:, None] + split_acc * share[:, None]
    return higher, total, acc


@triton.jit
def _fold_split(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    block_size: tl.tensor,
    kv_head: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    position: tl.tensor,
    scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    DOT_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Online softmax over tokens [first, stop), of which a query sees those up to its `position` [DOT_ROWS]."""
    dims = tl.arange(0, HEAD_PAD)
    highest = tl.full((DOT_ROWS,), _LOWEST, tl.float32)
    total = tl.zeros((DOT_ROWS,), tl.float32)
    acc = tl.zeros((DOT_ROWS, HEAD_PAD), tl.float32)
    for tile in tl.range(first, stop, TILE, num_stages=STAGES):
        token = tile + tl.arange(0, TILE)
        live = token < stop
        entry = token // block_size
        block = tl.load(table + entry, mask=live, other=0).to(tl.int64)
        place = ((block * block_size + (token - entry * block_size)) * NUM_KV_HEADS + kv_head) * HEAD_DIM
        inside = live[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(keys + place[:, None] + dims[None, :], mask=inside, other=0.0)
        value = tl.load(values + place[:, None] + dims[None, :], mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(token[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
        highest = higher
    return highest, total, acc


@triton.jit(
    do_not_specialize=["rows", "num_queries", "table_row", "block_size", "num_splits"],
    do_not_specialize_on_alignment=["block_tables", "positions"],
)
def _fixed_order_attention(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    block_tables: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    stats: tl.tensor,
    rows: tl.tensor,
    num_queries: tl.tensor,
    table_row: tl.tensor,
    block_size: tl.tensor,
    num_splits: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DOT_ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    MERGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        trigger_next()
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(0) // NUM_KV_HEADS
    query, member = tl.arange(0, DOT_ROWS) // GROUP_PAD, tl.arange(0, DOT_ROWS) % GROUP_PAD
    first_row = tl.program_id(1) * num_queries
    row = (first_row + query).to(tl.int64)
    live = (query < num_queries) & (row < rows) & (member < GROUP)
    dims = tl.arange(0, HEAD_PAD)[None, :]
    if PDL:
        wait_for_previous()
    position = tl.load(positions + row, mask=live, other=0).to(tl.int32)
    last = tl.max(tl.where(live, position, 0), axis=0)
    table = block_tables + first_row.to(tl.int64) * table_row
    head = (row * NUM_KV_HEADS + kv_head) * GROUP + member
    stored = live[:, None] & (dims < HEAD_DIM)
    queries = tl.load(q + head[:, None] * HEAD_DIM + dims, mask=stored, other=0.0)
    highest = tl.full((DOT_ROWS,), _LOWEST, tl.float32)
    total = tl.zeros((DOT_ROWS,), tl.float32)
    acc = tl.zeros((DOT_ROWS, HEAD_PAD), tl.float32)
    if MERGES:
        for first in range(0, last + 1, SPLIT):
            part = _fold_split(
                queries, keys, values, table, block_size, kv_head, first, tl.minimum(first + SPLIT, last + 1), position, scale,
                NUM_KV_HEADS, DOT_ROWS, HEAD_DIM, HEAD_PAD, TILE, STAGES,
            )  # fmt: skip
            highest, total, acc = _merge_split(highest, total, acc, part[0], part[1], part[2])
        done = acc / total[:, None]
        tl.store(out + head[:, None] * HEAD_DIM + dims, done.to(out.dtype.element_ty), mask=stored)
    elif split * SPLIT <= last:
        first = split * SPLIT
        part = _fold_split(
            queries, keys, values, table, block_size, kv_head, first, tl.minimum(first + SPLIT, last + 1), position, scale,
            NUM_KV_HEADS, DOT_ROWS, HEAD_DIM, HEAD_PAD, TILE, STAGES,
        )  # fmt: skip
        place = ((row * NUM_KV_HEADS + kv_head) * num_splits + split) * GROUP + member
        tl.store(stats + 2 * place, part[0], mask=live)
        tl.store(stats + 2 * place + 1, part[1], mask=live)
        tl.store(sums + place[:, None] * HEAD_DIM + dims, part[2], mask=stored)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["positions"])
def _merge_splits(
    sums: tl.tensor,
    stats: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    num_splits: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        trigger_next()
    row, kv_head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    member, dims = tl.arange(0, GROUP_PAD), tl.arange(0, HEAD_PAD)[None, :]
    live = member < GROUP
    stored = live[:, None] & (dims < HEAD_DIM)
    if PDL:
        wait_for_previous()
    last = tl.load(positions + row).to(tl.int32)
    highest = tl.full((GROUP_PAD,), _LOWEST, tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, HEAD_PAD), tl.float32)
    first = (row * NUM_KV_HEADS + kv_head) * num_splits
    for split in range(last // SPLIT + 1):
        place = (first + split) * GROUP + member
        split_highest = tl.load(stats + 2 * place, mask=live, other=_LOWEST)
        split_total = tl.load(stats + 2 * place + 1, mask=live, other=1.0)
        split_acc = tl.load(sums + place[:, None] * HEAD_DIM + dims, mask=stored, other=0.0)
        highest, total, acc = _merge_split(highest, total, acc, split_highest, split_total, split_acc)
    head = (row * NUM_KV_HEADS + kv_head) * GROUP + member
    done = acc / total[:, None]
    tl.store(out + head[:, None] * HEAD_DIM + dims, done.to(out.dtype.element_ty), mask=stored)


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: QueryTables,
    workspace: SplitWorkspace | None,
    *,
    head_dim: int,
) -> torch.Tensor:
    """q [rows, num_heads * head_dim], whose keys are in the pool already -> the same shape; scale 1 / sqrt(head_dim).

    keys and values are one layer's pool [num_blocks, block_size, kv_heads, head_dim]. With `workspace`, every split of a row
    has a program of its own; that is for few rows.
    """
    num_kv_heads, rows = keys.shape[2], len(q)
    group = q.shape[1] // head_dim // num_kv_heads
    out, constants = torch.empty_like(q), _constants(group, num_kv_heads, head_dim)
    num_queries = constants["DOT_ROWS"] // constants["GROUP_PAD"] if tables.is_one_sequence else 1
    splits = 1 if workspace is None else tables.num_splits
    assert q.is_contiguous()
    assert keys.is_contiguous()
    assert workspace is None or (splits <= workspace.num_splits and rows * num_kv_heads <= workspace.max_partials)
    _fixed_order_attention[(num_kv_heads * splits, triton.cdiv(rows, num_queries))](
        q,
        keys,
        values,
        tables.block_tables,
        tables.positions,
        out,
        out if workspace is None else workspace.sums,
        out if workspace is None else workspace.stats,
        rows,
        num_queries,
        0 if tables.is_one_sequence else tables.block_tables.stride(0),
        tables.block_size,
        splits,
        head_dim**-0.5 * math.log2(math.e),
        TILE=max(_TILE_ELEMENTS * 2 // (constants["HEAD_PAD"] * q.element_size()), MIN_DOT),
        STAGES=2,
        MERGES=workspace is None,
        num_warps=4,
        enable_fp_fusion=False,
        **constants,
        **launch_options(q.device),
    )
    if workspace is not None:
        _merge(workspace, tables.positions, out, splits, constants)
    return out


def _merge(
    workspace: SplitWorkspace, positions: torch.Tensor, out: torch.Tensor, splits: int, constants: dict[str, int]
) -> None:
    _merge_splits[(constants["NUM_KV_HEADS"], len(out))](
        workspace.sums,
        workspace.stats,
        positions,
        out,
        splits,
        num_warps=1,
        enable_fp_fusion=False,
        **{name: value for name, value in constants.items() if name != "DOT_ROWS"},
        **launch_options(out.device),
    )


def _constants(group: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    group_pad = power_of_two(group)
    return {
        "GROUP": group,
        "GROUP_PAD": group_pad,
        "DOT_ROWS": max(group_pad, MIN_DOT),
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": max(power_of_two(head_dim), MIN_DOT),
        "SPLIT": SPLIT_TOKENS,
    }
