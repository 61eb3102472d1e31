"""Decode steps in tensor-core kernels on a real GPU: every public shape against torch in single precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.kernels import Way
from bench.shapes import SHAPES
from tests.fakes import reference_kernels as reference
from tests.fakes.whole_steps import CUDA, Decoding, check, model_of, two_layers
from worker.kernels.device import has_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and has_triton()), reason="needs a CUDA device and triton"),
]

LENGTHS = (200, 1, 17, 253, 90, 33, 128, 2, 250, 64, 5, 65, 111, 199, 31, 240)
MANY = LENGTHS * 4
ROWS_OF: dict[Way, tuple[int, ...]] = {"rows": (2, 8, 11), "blocks": (9, 32)}
CASES = [(way, rows) for way, counts in ROWS_OF.items() for rows in counts]


@pytest.mark.parametrize(("way", "rows"), CASES)
@pytest.mark.parametrize("name", SHAPES)
def test_steps_of_ragged_rows_stay_near_single_precision(name: str, way: Way, rows: int) -> None:
    check(name, MANY[:rows], 16, torch.bfloat16, way=way)


@pytest.mark.parametrize("way", ROWS_OF)
def test_steps_in_float16(way: Way) -> None:
    check("qwen2.5-1.5b", LENGTHS[:9], 16, torch.float16, way=way)


@pytest.mark.parametrize("way", ROWS_OF)
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen2.5-1.5b"])
def test_steps_at_every_length_in_a_wide_tier(name: str, way: Way) -> None:
    check(name, (2049, 700, 3, 256, 257, 512, 3900, 1, 1025), 256, torch.bfloat16, way=way)


@pytest.mark.parametrize("way", ROWS_OF)
@torch.inference_mode()
def test_a_replayed_graph_gives_the_bits_of_eager_steps(way: Way) -> None:
    model = two_layers("llama-3.2-1b", torch.bfloat16)
    replayed, eager = (Decoding(model, LENGTHS[:8], 20, way=way) for _ in range(2))
    graph, (logits, chosen) = replayed.capture()
    for _ in range(20):
        graph.replay()
        expected, expected_chosen = eager.step()
        assert torch.equal(logits, expected)
        assert torch.equal(chosen, expected_chosen)


@pytest.mark.parametrize("way", ROWS_OF)
@torch.inference_mode()
def test_a_rows_logits_do_not_depend_on_nan_in_another_rows_past(way: Way) -> None:
    model = two_layers("llama-3.2-1b", torch.bfloat16)
    clean, poisoned = (Decoding(model, LENGTHS[:4], 20, way=way) for _ in range(2))
    poisoned.cache.storage[:, :, poisoned.tables[0].to(CUDA)] = torch.nan
    (ours, chosen), (theirs, _) = poisoned.step(), clean.step()
    assert torch.equal(ours[1:], theirs[1:])
    assert chosen[:, 1].tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("way", ROWS_OF)
@torch.inference_mode()
def test_128_replays_back_to_back_give_the_same_tokens_8_times(way: Way) -> None:
    decoding = Decoding(model_of("llama-3.2-1b", torch.bfloat16), (30, 5, 90, 1, 250, 17, 2040, 9), 160, way=way)
    start = decoding.cache.storage.clone()
    graph, (logits, _) = decoding.capture()
    ends: list[Any] = []
    for _ in range(8):
        decoding.cache.storage.copy_(start)
        decoding.reset()
        for _ in range(128):
            graph.replay()
        # The keys of every token are in the pool: a single other token would leave another sum.
        pool = decoding.cache.storage.view(torch.int16)
        ends.append((decoding.inputs.last_tokens.clone(), logits.clone(), pool.long().sum()))
    for tokens, last_logits, pool_sum in ends[1:]:
        assert torch.equal(tokens, ends[0][0])
        assert torch.equal(last_logits, ends[0][1])
        assert torch.equal(pool_sum, ends[0][2])


def scaled(rows: int, size: int, columns: int) -> Any:
    """Vectors as a norm leaves them for the product, and normed."""
    from worker.kernels.rows_product import ScaledRows

    wide = torch.randn(rows, size, device=CUDA)
    scale = 1 + 0.1 * torch.randn(size, device=CUDA)
    squares = torch.zeros(3, columns, device=CUDA)
    squares[0, :rows] = wide.square().sum(-1)
    x = (wide * scale).to(torch.bfloat16)
    normed = x.float() * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return ScaledRows(x=x, squares=squares), normed


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((actual.float() - expected).norm() / expected.norm())
    assert error < 6e-3, error


@pytest.mark.parametrize(("out", "num_warps", "chunk", "ahead", "pace"), [(16, 8, 512, 2, 1), (32, 4, 512, 1, 0)])
@pytest.mark.parametrize(("rows", "size", "outputs"), [(5, 576, 1536), (16, 1000, 344), (2, 2048, 40)])
def test_products_for_a_few_rows(
    rows: int, size: int, outputs: int, out: int, num_warps: int, chunk: int, ahead: int, pace: int
) -> None:
    from worker.kernels.row_tiles import RowTile, columns_for
    from worker.kernels.rows_product import ScaledRows, rows_add, rows_gated, rows_logits, rows_plain

    tile, columns = RowTile(out, num_warps, chunk, ahead, pace), columns_for(rows)
    vectors, normed = scaled(rows, size, columns)
    weight = (torch.randn(2 * outputs, size, device=CUDA) / size**0.5).to(torch.bfloat16)
    bias = torch.randn(2 * outputs, device=CUDA).to(torch.bfloat16)
    half, half_bias = weight[:outputs], bias[:outputs]
    plain = normed @ half.float().T

    logits, best = torch.full((rows, outputs), torch.nan, device=CUDA), torch.full((rows,), -(2**62), device=CUDA)
    rows_plain(vectors, half, tile, eps=1e-5, bias=half_bias, out=logits)
    assert_near(logits, plain + half_bias.float())
    rows_logits(vectors, half, tile, eps=1e-5, out=logits, best=best)
    assert_near(logits, plain)
    assert torch.equal(0x7FFFFFFF - (best & 0x7FFFFFFF), logits.argmax(-1))
    gated = torch.full((rows, outputs), torch.nan, device=CUDA, dtype=torch.bfloat16)
    rows_gated(vectors, weight, tile, eps=1e-5, bias=bias, out=gated)
    assert_near(gated, reference.silu_mul(normed @ weight.float().T + bias.float()))

    residual = torch.randn(rows, outputs, device=CUDA)
    expected = residual + vectors.x.float() @ half.float().T + half_bias.float()
    scale = 1 + 0.1 * torch.randn(outputs, device=CUDA).to(torch.bfloat16)
    squares = torch.full((-(-outputs // out), columns), torch.nan, device=CUDA)
    made = ScaledRows(x=torch.full_like(gated, torch.nan), squares=squares)
    rows_add(vectors.x, half, tile, bias=half_bias, residual=residual, scale=scale, out=made)
    assert_near(residual, expected)
    assert_near(made.x, expected * scale.float())
    assert_near(made.squares.sum(0)[:rows], expected.square().sum(-1))


@pytest.mark.parametrize(("chunk", "stages", "parts"), [(64, 3, 4), (128, 2, 1), (64, 8, 2)])
@pytest.mark.parametrize(("rows", "size", "outputs"), [(5, 576, 1536), (16, 1000, 344), (61, 2048, 40)])
def test_products_in_blocks(rows: int, size: int, outputs: int, chunk: int, stages: int, parts: int) -> None:
    from worker.kernels.block_product import block_gated, block_logits, block_parts
    from worker.kernels.block_tiles import BlockTile
    from worker.kernels.rms_norm import rms_norm_parts

    x = torch.randn(rows, size, device=CUDA).to(torch.bfloat16)
    weight = (torch.randn(2 * outputs, size, device=CUDA) / size**0.5).to(torch.bfloat16)
    bias = torch.randn(2 * outputs, device=CUDA).to(torch.bfloat16)
    half, half_bias = weight[:outputs], bias[:outputs]
    plain = x.float() @ half.float().T

    out = torch.full((parts, rows, outputs), torch.nan, device=CUDA)
    block_parts(x, half, BlockTile(chunk, stages, parts), bias=half_bias, out=out)
    assert_near(out.sum(0), plain + half_bias.float())
    residual, before = (torch.ones(rows, outputs, device=CUDA) for _ in range(2))
    scale, normed = torch.rand(outputs, device=CUDA).to(torch.bfloat16), torch.empty_like(x[:, :1].expand(-1, outputs))
    normed = normed.contiguous()
    rms_norm_parts(out, scale, 1e-5, residual=residual, out=normed)
    assert_near(normed, reference.rms_norm(plain + half_bias.float(), scale.float(), 1e-5, residual=before))
    assert_near(residual, before)

    tile = BlockTile(chunk, stages)
    logits, best = torch.full((rows, outputs), torch.nan, device=CUDA), torch.full((rows,), -(2**62), device=CUDA)
    block_logits(x, half, tile, out=logits, best=best)
    assert_near(logits, plain)
    assert torch.equal(0x7FFFFFFF - (best & 0x7FFFFFFF), logits.argmax(-1))
    gated = torch.full((rows, outputs), torch.nan, device=CUDA, dtype=torch.bfloat16)
    block_gated(x, weight, tile, bias=bias, out=gated)
    assert_near(gated, reference.silu_mul(x.float() @ weight.float().T + bias.float()))
