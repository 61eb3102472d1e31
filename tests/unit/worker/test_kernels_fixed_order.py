"""The fixed-order kernels, under Triton's interpreter where there is no GPU: right, and row by row the same bits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.fakes import reference_kernels as reference
from tests.fakes.fixed_order_interpreter import products_like_instructions, short_splits  # noqa: F401
from tests.fakes.kernel_inputs import Heads, Pool, layout
from tests.fakes.triton_interpreter import DEVICE
from worker.kernels.fixed_order_attention import QueryTables, SplitWorkspace, attention
from worker.kernels.fixed_order_matmul import ROW_TILES, SplitSums, matmul, matmul_gated, split_count
from worker.kernels.fixed_order_rope import turn_and_store
from worker.kernels.fixed_order_rows import add_norm, embed_norm
from worker.kernels.row_slots import row_slots


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize(("outputs", "size"), [(64, 32), (100, 48), (192, 576), (70, 1600)])
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_a_product_is_right_for_any_shape(outputs: int, size: int, rows: int) -> None:
    x, weight = normal(rows, size), normal(outputs, size, seed=1)
    sums = matmul(x, weight, row_tile=16)
    assert sums.parts.shape == (split_count(outputs, size), rows, outputs)
    torch.testing.assert_close(sums.total(), x @ weight.t(), rtol=1e-4, atol=1e-3)


def test_tiles_of_rows_change_no_bit() -> None:
    x, weight = normal(130, 320), normal(96, 320, seed=1)
    first = matmul(x, weight, row_tile=16).parts
    for row_tile in ROW_TILES[1:]:
        assert torch.equal(matmul(x, weight, row_tile=row_tile).parts, first)
    assert torch.equal(matmul(x[37:40].contiguous(), weight, row_tile=16).parts, first[:, 37:40])


@pytest.mark.parametrize("has_bias", [False, True])
def test_gates_and_ups_meet(has_bias: bool) -> None:
    x, weight, bias = normal(5, 64), normal(2 * 70, 64, seed=1), normal(140, seed=2)
    gated = matmul_gated(x, weight, bias if has_bias else None, row_tile=16)
    both = x @ weight.t() + (bias if has_bias else 0)
    torch.testing.assert_close(gated, functional.silu(both[:, :70]) * both[:, 70:], rtol=1e-4, atol=1e-4)
    assert torch.equal(matmul_gated(x, weight, bias if has_bias else None, row_tile=128), gated)


def test_shares_of_a_sum_depend_on_the_matrix_alone() -> None:
    assert split_count(2048, 8192) == 4
    assert split_count(16384, 2048) == 1
    assert split_count(576, 576) == 2
    assert split_count(64, 128) == 1


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_are_added_in_order_and_normed(splits: int) -> None:
    parts, bias, residual = normal(splits, 4, 100), normal(100, seed=1), normal(4, 100, seed=2)
    weight = normal(100, seed=3, dtype=torch.bfloat16)
    expected = residual + (parts.sum(0) + bias)
    kept = residual.clone()
    normed = add_norm(SplitSums(parts), bias, kept, weight, 1e-5)
    torch.testing.assert_close(kept, expected)
    torch.testing.assert_close(
        normed.float(), functional.rms_norm(expected, (100,), weight.float(), 1e-5), rtol=1e-2, atol=1e-2
    )


def test_words_are_embedded_and_normed() -> None:
    words, weight = normal(50, 40, dtype=torch.bfloat16), normal(40, seed=1, dtype=torch.bfloat16)
    token_ids = torch.tensor([3, 49, 0], device=DEVICE)
    residual, normed = embed_norm(token_ids, words, weight, 1e-5)
    assert torch.equal(residual, words[token_ids].float())
    expected = functional.rms_norm(residual, (40,), weight.float(), 1e-5)
    torch.testing.assert_close(normed.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("has_norms", [False, True])
def test_projections_are_turned_and_stored(has_norms: bool) -> None:
    heads = Heads(num_heads=6, num_kv_heads=2, head_dim=16, has_norms=has_norms)
    parts, bias = normal(2, 3, heads.total * 16), normal(heads.total * 16, seed=1)
    positions, slots = torch.tensor([4, 0, 9], device=DEVICE), torch.tensor([7, 2, 31], device=DEVICE)
    description = layout(heads, dtype=torch.float32, device=DEVICE, num_positions=16)
    mine, theirs = (torch.zeros(2, 8, 4, 2, 16, device=DEVICE) for _ in range(2))
    queries = turn_and_store(SplitSums(parts), bias, description, positions, slots, mine[0], mine[1])
    qkv = (parts[0] + parts[1]) + bias
    reference.rope_and_cache(qkv, description, positions, slots, theirs[0], theirs[1])
    torch.testing.assert_close(queries, qkv[:, : 6 * 16])
    torch.testing.assert_close(mine, theirs)


class Rows:
    """Queries with a past, in a pool that holds NaN where nobody lives."""

    def __init__(self, heads: Heads, lengths: list[int], block_size: int = 16) -> None:
        width = -(-max(lengths) // block_size)
        pool = Pool(heads, lengths, width=width, dtype=torch.float32, device=DEVICE, block_size=block_size)
        self.heads, self.keys, self.values, self.lengths = heads, pool.keys, pool.values, lengths
        self.tables = QueryTables(positions=pool.positions, block_tables=pool.block_tables, block_size=block_size)
        # What this step has written: the pool holds NaN where the new tokens go.
        places = row_slots(self.tables)
        for pool_slots, seed in ((self.keys, 8), (self.values, 9)):
            shape = (len(lengths), heads.num_kv_heads, heads.head_dim)
            pool_slots.flatten(0, 1)[places] = normal(*shape, seed=seed)
        self.q = normal(len(lengths), heads.num_heads * heads.head_dim, seed=3)

    def workspace(self) -> SplitWorkspace:
        group = self.heads.num_heads // self.heads.num_kv_heads
        return SplitWorkspace(
            max_partials=len(self.q) * self.heads.num_kv_heads,
            max_tokens=max(self.lengths) + 40,
            group=group,
            head_dim=self.heads.head_dim,
            device=DEVICE,
        )

    def attend(self, *, splits: bool) -> torch.Tensor:
        workspace = self.workspace() if splits else None
        return attention(self.q, self.keys, self.values, self.tables, workspace, head_dim=self.heads.head_dim)


GROUPS = [
    Heads(num_heads=4, num_kv_heads=2, head_dim=32),
    Heads(num_heads=3, num_kv_heads=1, head_dim=20),
    Heads(num_heads=2, num_kv_heads=2, head_dim=64),
]


@pytest.mark.parametrize("heads", GROUPS)
def test_attention_is_right_with_and_without_programs_for_splits(heads: Heads) -> None:
    rows = Rows(heads, [1, 16, 31, 32, 33, 70])
    out = rows.attend(splits=False)
    expected = reference.paged_attention(
        rows.q.view(6, heads.num_heads, heads.head_dim),
        rows.keys,
        rows.values,
        rows.tables.block_tables.long(),
        rows.tables.positions + 1,
        scale=heads.head_dim**-0.5,
    )
    torch.testing.assert_close(out, expected.flatten(1), rtol=1e-4, atol=1e-4)
    assert torch.equal(rows.attend(splits=True), out)


@pytest.mark.parametrize("heads", GROUPS)
def test_a_prompt_token_gets_the_bits_of_a_decoded_one(heads: Heads) -> None:
    total, block_size = 70, 4
    rows = Rows(heads, [total], block_size)
    table = rows.tables.block_tables[0]
    q = normal(total, heads.num_heads * heads.head_dim, seed=5)
    positions = torch.arange(total, device=DEVICE)
    slots = table[positions // block_size].long() * block_size + positions % block_size
    kinds = {
        "chunk": QueryTables(positions=positions, block_tables=table, block_size=block_size),
        "fresh": QueryTables(positions=positions, block_tables=slots.int(), block_size=1),
    }
    whole = {
        name: attention(q, rows.keys, rows.values, tables, None, head_dim=heads.head_dim)
        for name, tables in kinds.items()
    }
    assert torch.equal(whole["chunk"], whole["fresh"])
    for token in (0, 3, 31, 32, 69):
        decoded = QueryTables(positions=positions[token : token + 1], block_tables=table[None], block_size=block_size)
        for workspace in (None, rows.workspace()):
            one = attention(q[token : token + 1], rows.keys, rows.values, decoded, workspace, head_dim=heads.head_dim)
            assert torch.equal(one[0], whole["chunk"][token])
    later = QueryTables(positions=positions[21:], block_tables=table, block_size=block_size)
    rest = attention(q[21:].contiguous(), rows.keys, rows.values, later, None, head_dim=heads.head_dim)
    assert torch.equal(rest, whole["chunk"][21:])
