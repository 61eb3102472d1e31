"""The fused kernels on a real GPU, at the shapes of the public models, against plain torch in single precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fakes import reference_kernels as reference
from tests.fakes.kernel_inputs import Heads, Pool, layout, projections, workspace
from worker.kernels.device import has_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and has_triton()), reason="needs a CUDA device and triton"),
]

if torch.cuda.is_available() and has_triton():
    from worker.kernels.decode_attention import decode_attention
    from worker.kernels.greedy import RowState, greedy, pick_tokens
    from worker.kernels.rms_norm import rms_norm
    from worker.kernels.rope_cache import rope_and_cache
    from worker.kernels.silu_mul import silu_mul

CUDA = torch.device("cuda")
BLOCK_SIZE = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)
SIZES = {
    "smollm2-135m": (576, 1536, 49152),
    "llama-3.2-1b": (2048, 8192, 128256),
    "qwen2.5-1.5b": (1536, 8960, 151936),
    "llama-2-7b": (4096, 11008, 32000),
    "qwen3-8b": (4096, 12288, 151936),
}
HEADS = {
    "smollm2-135m": Heads(num_heads=9, num_kv_heads=3, head_dim=64),
    "llama-3.2-1b": Heads(num_heads=32, num_kv_heads=8, head_dim=64),
    "qwen2.5-1.5b": Heads(num_heads=12, num_kv_heads=2, head_dim=128),
    "llama-2-7b": Heads(num_heads=32, num_kv_heads=32, head_dim=128),
    "qwen3-8b": Heads(num_heads=32, num_kv_heads=8, head_dim=128, has_norms=True),
    "head of 80": Heads(num_heads=8, num_kv_heads=8, head_dim=80),
    "head of 96": Heads(num_heads=8, num_kv_heads=2, head_dim=96, has_norms=True),
    "head of 256": Heads(num_heads=8, num_kv_heads=1, head_dim=256),
    "group of 24": Heads(num_heads=24, num_kv_heads=1, head_dim=64),
}
STEPS: dict[str, tuple[int, tuple[int, ...]]] = {
    "tier 256": (16, (1, 2, 15, 16, 17, 127, 128, 129, 255, 256)),
    "tier 1024": (64, (1, 16, 255, 256, 257, 258, 511, 512, 513, 1023, 1024)),
    "tier 4096, one row": (256, (4096,)),
    "tier 4096, ragged": (256, (1, 300, 1025, 2049, 4095)),
    "tier 16384, one short row": (1024, (100,)),
    "tier 16384, one row": (1024, (16383,)),
    "many rows": (64, tuple(1 + (37 * i) % 1024 for i in range(64))),
}


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA).to(dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, *, equal_nan: bool = False) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), atol=tolerance, rtol=tolerance, equal_nan=equal_nan)


class Step:
    """One layer of one decode step, and what it should give."""

    def __init__(self, heads: Heads, width: int, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
        self.heads, self.lengths = heads, lengths
        self.pool = Pool(heads, lengths, width=width, dtype=dtype, device=CUDA, block_size=BLOCK_SIZE)
        self.layout = layout(heads, dtype=dtype, device=CUDA, num_positions=width * BLOCK_SIZE)
        self.qkv = projections(heads, len(lengths), dtype=dtype, device=CUDA)
        self.workspace = workspace(heads, len(lengths), CUDA)

    def run(self, keys: torch.Tensor, values: torch.Tensor, **options: Any) -> torch.Tensor:
        return decode_attention(
            self.layout.split(self.qkv), keys, values, self.pool.block_tables, self.pool.positions, self.workspace,
            layout=self.layout, **options,
        )  # fmt: skip

    def check(self, window: int | None = None) -> None:
        pool, qkv = self.pool, self.qkv.clone()
        keys, values = pool.keys.clone(), pool.values.clone()
        out = self.run(keys, values, sliding_window=window)
        reference.rope_and_cache(qkv, self.layout, pool.positions, pool.slots, pool.keys, pool.values)
        assert_near(keys, pool.keys, equal_nan=True)
        assert torch.equal(values.nan_to_num(7.0), pool.values.nan_to_num(7.0))
        queries = self.layout.split(qkv)[0]
        expected = reference.paged_attention(
            queries.float(), pool.keys, pool.values, pool.block_tables, pool.positions + 1,
            scale=self.heads.head_dim**-0.5, sliding_window=window,
        )  # fmt: skip
        assert_near(out, expected)
        assert not self.workspace.arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 256])
@pytest.mark.parametrize("model", SIZES)
def test_norm_and_activation(model: str, rows: int, dtype: torch.dtype) -> None:
    hidden, intermediate, _ = SIZES[model]
    x, weight, residual = (normal(*shape, dtype=dtype) for shape in ((rows, hidden), (hidden,), (rows, hidden)))
    expected_residual = residual.clone()
    assert_near(rms_norm(x, weight, 1e-5), reference.rms_norm(x.float(), weight.float(), 1e-5))
    expected = reference.rms_norm(x, weight, 1e-5, residual=expected_residual)
    assert_near(rms_norm(x, weight, 1e-5, residual=residual), expected)
    assert torch.equal(residual, expected_residual)
    gate_up = normal(rows, 2 * intermediate, dtype=dtype)
    assert_near(silu_mul(gate_up), reference.silu_mul(gate_up.float()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", HEADS)
def test_rotation_and_cache_of_a_prompt(model: str, dtype: torch.dtype) -> None:
    heads = HEADS[model]
    lengths = tuple(range(1, 258))
    pool = Pool(heads, lengths, width=17, dtype=dtype, device=CUDA, block_size=BLOCK_SIZE)
    angles = layout(heads, dtype=dtype, device=CUDA, num_positions=300)
    qkv = projections(heads, len(lengths), dtype=dtype, device=CUDA)
    expected, keys, values = qkv.clone(), pool.keys.clone(), pool.values.clone()

    rope_and_cache(qkv, angles, pool.positions, pool.slots, keys, values)

    reference.rope_and_cache(expected, angles, pool.positions, pool.slots, pool.keys, pool.values)
    assert_near(qkv, expected)
    assert_near(keys, pool.keys, equal_nan=True)
    assert torch.equal(values.nan_to_num(7.0), pool.values.nan_to_num(7.0))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("model", HEADS)
def test_decode_attention_at_every_edge_with_nan_in_all_dead_slots(model: str, step: str) -> None:
    Step(HEADS[model], *STEPS[step], torch.bfloat16).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("model", HEADS)
def test_decode_attention_in_other_types(model: str, dtype: torch.dtype) -> None:
    Step(HEADS[model], *STEPS["tier 1024"], dtype).check()


@pytest.mark.parametrize("window", [1, 16, 100, 1000])
def test_decode_attention_with_a_sliding_window(window: int) -> None:
    Step(HEADS["llama-3.2-1b"], *STEPS["tier 1024"], torch.bfloat16).check(window)


def test_split_rows_give_the_same_bits_every_time() -> None:
    step = Step(HEADS["llama-3.2-1b"], *STEPS["tier 4096, ragged"], torch.bfloat16)
    keys, values = step.pool.keys, step.pool.values
    first = step.run(keys, values)
    for _ in range(500):
        assert torch.equal(step.run(keys, values), first)


def test_rows_beyond_two_to_the_31_numbers_of_pool() -> None:
    heads = Heads(num_heads=8, num_kv_heads=8, head_dim=128)
    num_blocks = (2**31 + 2**25) // (BLOCK_SIZE * 8 * 128)
    keys, values = (
        torch.full((num_blocks, BLOCK_SIZE, 8, 128), torch.nan, dtype=torch.bfloat16, device=CUDA) for _ in range(2)
    )
    step = Step(heads, 16, (200, 256), torch.bfloat16)
    moved = step.pool.block_tables + (num_blocks - len(step.pool.keys))
    keys[-len(step.pool.keys) :], values[-len(step.pool.keys) :] = step.pool.keys, step.pool.values
    expected = step.run(step.pool.keys, step.pool.values)
    step.pool.block_tables = moved

    assert torch.equal(step.run(keys, values), expected)

    slots = step.pool.slots + (num_blocks - len(step.pool.keys)) * BLOCK_SIZE
    rope_and_cache(step.qkv, step.layout, step.pool.positions, slots, keys, values)
    assert_near(keys[-len(step.pool.keys) :], step.pool.keys, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5, 256])
@pytest.mark.parametrize("model", SIZES)
def test_greedy_tokens(model: str, rows: int, dtype: torch.dtype) -> None:
    logits = normal(rows, SIZES[model][2], dtype=dtype)
    logits[rows // 2, 3] = 50.0
    if rows > 1:
        logits[0, -1] = torch.nan
    state = RowState(
        last_tokens=torch.zeros(rows + 1, dtype=torch.int64, device=CUDA),
        positions=torch.arange(rows, device=CUDA),
        live=torch.arange(rows, device=CUDA) % 2,
        sources=torch.full((rows,), -1, device=CUDA),
    )

    wide, chosen = greedy(logits, state)

    assert torch.equal(wide.nan_to_num(7.0), logits.float().nan_to_num(7.0))
    best = logits.float().amax(dim=-1, keepdim=True)
    lowest = (logits.float() == best).int().argmax(dim=-1)
    is_finite = best[:, 0].isfinite()
    assert torch.equal(chosen[:, 1], is_finite.long())
    assert torch.equal(chosen[is_finite, 0], lowest[is_finite])
    assert torch.equal(state.last_tokens[:rows], chosen[:, 0])
    numbers = torch.arange(rows, device=CUDA)
    assert torch.equal(state.positions, numbers + numbers % 2)
    assert torch.equal(state.sources, numbers)
    assert torch.equal(pick_tokens(numbers, state.sources, state.last_tokens), chosen[:, 0])
