"""The pieces of deterministic mode on the CPU: tiles, exact operations, products, attention, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.tiny_model import tiny_engine, tiny_model
from worker.causal_lm import ModelShape
from worker.config import WorkerConfig
from worker.deterministic.cpu_model import CpuFixedOrderCausalLM, verify_attention
from worker.deterministic.cpu_product import product, tile_product
from worker.deterministic.exact import fixed_sum, rms_norm, silu_mul, turn
from worker.deterministic.row_tiles import RowTiles
from worker.deterministic.verify import equal_tiles
from worker.errors import ModelLoadError
from worker.load_causal_lm import ServedModel

TILES = RowTiles((4, 8, 16, 32))


def shape(**changes: int) -> ModelShape:
    sizes = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 97, "head_dim": 8}
    values = {**sizes, "num_heads": 4, "num_kv_heads": 2, "max_position_embeddings": 64, **changes}
    return ModelShape(**values)


@settings(deadline=None)
@given(st.integers(1, 500), st.sampled_from([(1,), (4, 8), (4, 8, 16, 32, 64, 128), (16, 128), (3, 7)]))
def test_tiles_hold_all_rows_and_only_the_last_is_padded(rows: int, sizes: tuple[int, ...]) -> None:
    cut = RowTiles(sizes).cut(rows)
    assert set(cut) <= set(sizes)
    assert sum(cut[:-1]) < rows <= sum(cut)


def test_a_tile_is_padded_by_a_quarter_at_most_while_there_is_a_smaller_one() -> None:
    tiles = RowTiles((4, 8, 16, 32, 64, 128))
    assert tiles.cut(1) == (4,)
    assert tiles.cut(7) == (8,)
    assert tiles.cut(100) == (128,)
    assert tiles.cut(70) == (64, 8)
    assert tiles.cut(300) == (128, 128, 32, 16)


@pytest.mark.parametrize("sizes", [(), (0, 4), (8, 4), (4, 4)])
def test_tiles_must_be_positive_and_ascending(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be positive and ascending"):
        RowTiles(sizes)


@settings(deadline=None)
@given(st.integers(1, 700))
def test_the_fixed_sum_is_a_sum(size: int) -> None:
    x = torch.rand(3, size, dtype=torch.float64)
    torch.testing.assert_close(fixed_sum(x), x.sum(-1, keepdim=True))


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 60), st.sampled_from([5, 16, 48, 577]))
def test_small_operations_do_not_depend_on_where_a_row_lies(first: int, rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(first + rows + 3, 2 * size, generator=generator) * 4
    weight, part = torch.rand(2 * size, generator=generator), slice(first, first + rows)
    assert torch.equal(rms_norm(x, weight, 1e-5)[part], rms_norm(x[part].clone(), weight, 1e-5))
    assert torch.equal(silu_mul(x)[part], silu_mul(x[part].clone()))
    heads, cos, sin = x.view(len(x), 1, -1), *torch.rand(2, len(x), 1, size, generator=generator)
    assert torch.equal(turn(heads, cos, sin)[part], turn(heads[part].clone(), cos[part], sin[part]))


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 70), st.sampled_from([(96, 32), (97, 20), (192, 576), (49, 300)]))
def test_a_product_gives_a_row_the_same_bits_in_any_step(first: int, rows: int, size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(first + rows, size[1], generator=generator)
    weight = torch.randn(size, generator=generator)
    whole = product(x, weight, TILES)
    torch.testing.assert_close(whole, x @ weight.t(), rtol=1e-4, atol=1e-4)
    assert torch.equal(whole[first:], product(x[first:].clone(), weight, TILES))


@pytest.mark.parametrize("out", [960, 576, 49152, 97, 33, 1])
def test_every_number_of_outputs_can_be_computed(out: int) -> None:
    x, weight = torch.randn(4, 24), torch.randn(out, 24)
    torch.testing.assert_close(tile_product(x, weight), x @ weight.t(), rtol=1e-4, atol=1e-4)


def test_tiles_that_round_otherwise_are_not_used() -> None:
    rows = torch.randn(16, 8)

    def rounds_by_size(x: torch.Tensor) -> torch.Tensor:
        return x if len(x) != 8 else x + 1

    def rounds_by_place(x: torch.Tensor) -> torch.Tensor:
        return x + (torch.arange(len(x)) == 15)[:, None]

    assert equal_tiles((4, 8, 16), rounds_by_size, rows, "it").sizes == (4, 16)
    assert equal_tiles((4, 8, 16), rounds_by_place, rows, "it").sizes == (4, 8)


def test_a_device_without_any_fixed_order_is_refused() -> None:
    rows = torch.randn(16, 8)
    with pytest.raises(ModelLoadError, match="on this device the sum rounds a row by its place"):
        equal_tiles((4, 8), lambda x: x + torch.arange(len(x))[:, None], rows, "the sum")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 64), (4, 4, 8), (7, 1, 80), (12, 2, 128)]
)
def test_attention_over_a_tile_is_the_same_in_decode_and_prefill(heads: int, kv_heads: int, head_dim: int) -> None:
    tiles = verify_attention(shape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim))
    assert tiles.sizes == (16, 128)


def test_the_model_is_the_same_one() -> None:
    model = tiny_model(qk_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True)
    tokens, positions = torch.randint(0, 200, (2, 9))[0], torch.arange(9)
    fast, fixed = tiny_engine(model), tiny_engine(model, deterministic=True)
    rows = [
        engine.runner.model.compute(tokens, positions, engine.runner.kernels.fresh(slots=positions + 4), None)  # type: ignore[attr-defined]
        for engine in (fast, fixed)
    ]
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-4)
    assert isinstance(fixed.runner.model, CpuFixedOrderCausalLM)  # type: ignore[attr-defined]


def test_sliding_windows_hide_the_same_keys_in_both_phases() -> None:
    engine = tiny_engine(tiny_model(), deterministic=True)
    kernels, count = engine.runner.kernels, 40  # type: ignore[attr-defined]
    table = torch.arange(1, 11, dtype=torch.int32)
    q, k, v = torch.randn(count, 4, 8), torch.randn(count, 2, 8), torch.randn(count, 2, 8)
    slots = torch.arange(4, 4 + count)
    whole = kernels.fresh(slots=slots)(0, q, k, v, sliding_window=5)
    chunk = kernels.chunk(
        slots=slots[30:], positions=torch.arange(30, 40), block_table=table, context_len=torch.tensor([count])
    )
    assert torch.equal(chunk(0, q[30:], k[30:], v[30:], sliding_window=5), whole[30:])
    repeated, seen = k.repeat_interleave(2, 1), slice(count - 5, count)
    weights = torch.einsum("hd,thd->ht", q[-1], repeated[seen]).mul(8**-0.5).softmax(-1)
    torch.testing.assert_close(whole[-1], torch.einsum("ht,thd->hd", weights, v.repeat_interleave(2, 1)[seen]))


def test_what_cannot_be_deterministic_is_refused() -> None:
    with pytest.raises(ValueError, match="only the native decoder"):
        WorkerConfig(deterministic=True, model_impl="transformers")
    with pytest.raises(ValueError, match="needs dtype 'float32', not 'bfloat16'"):
        tiny_engine(tiny_model(dtype=torch.bfloat16), deterministic=True)
    native = tiny_model()
    other = ServedModel(_Other(native.model), native.eos_token_ids, {}, "transformers")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="this model runs on transformers"):
        tiny_engine(other, deterministic=True)


class _Other:
    """A model that is no native decoder."""

    def __init__(self, model: object) -> None:
        self.module = model.module  # type: ignore[attr-defined]
        self.shape = model.shape  # type: ignore[attr-defined]
