"""Whole decode steps in matrix-vector kernels against plain torch. Without a GPU they run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.fakes.tiny_model import tiny_model
from tests.fakes.triton_interpreter import DEVICE
from worker.decode_inputs import DecodeInputs
from worker.decode_step import decode_step
from worker.kernels.early_plan import EarlyPlan
from worker.kernels.matrix_kind import MatrixKind
from worker.kernels.vector_tiles import Tile
from worker.kv_cache import KVCache
from worker.step_kernels import Outputs, StepKernels, TorchKernels
from worker.triton_kernels import TritonKernels

BLOCK_SIZE, WIDTH = 4, 32
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "odd numbers of heads": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 16, "hidden_size": 48},
    "qwen2": {"model_type": "qwen2", "qkv_bias": True},
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "num_heads": 6},
    "all biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
}
TILES = {
    "all at once": Tile(4, 1, 64),
    "paced": Tile(4, 1, 16, 1),
    "paced by halves": Tile(2, 1, 16, 2),
    "warps abreast": Tile(8, 4, 64, 2),
}


class Decoding:
    """Rows in the middle of their answers, over a pool that holds NaN where nothing lives."""

    def __init__(self, model: Any, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
        shape, self.model, self.lengths = model.shape, model, lengths
        self.cache = KVCache(
            num_layers=shape.num_layers,
            num_blocks=len(lengths) * WIDTH + 1,
            block_size=BLOCK_SIZE,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            device=DEVICE,
        )
        past = torch.randn(self.cache.storage.shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        self.cache.storage.copy_(past.to(DEVICE))
        self.inputs = DecodeInputs(max_batch=len(lengths), max_blocks=WIDTH, block_size=BLOCK_SIZE, device=DEVICE)
        host = self.inputs.staging.writable()
        host["positions"][...] = [length - 1 for length in lengths]
        host["token_ids"][...] = [7 * row + 3 for row in range(len(lengths))]
        host["live"][...], host["sources"][...] = 1, -1
        for row in range(len(lengths)):
            host["block_tables"][row] = range(1 + row * WIDTH, 1 + (row + 1) * WIDTH)
        self.inputs.staging.upload()

    def poison(self) -> None:
        """NaN in the padding block and wherever no row's past lies."""
        self.cache.storage[:, :, 0] = torch.nan
        for row, length in enumerate(self.lengths):
            blocks = slice(1 + row * WIDTH, 1 + (row + 1) * WIDTH)
            self.cache.storage[:, :, blocks].view(*self.cache.storage.shape[:2], WIDTH * BLOCK_SIZE, -1)[
                :, :, length - 1 :
            ] = torch.nan

    def step(self, kernels: StepKernels) -> Outputs:
        with torch.inference_mode():
            return decode_step(self.model, kernels, self.inputs.views(len(self.lengths), WIDTH))

    def vector_step(self, kernels: TritonKernels) -> Outputs:
        with torch.inference_mode():
            outputs = kernels.whole_step(self.model, self.inputs.views(len(self.lengths), WIDTH))
        assert outputs is not None
        return outputs


@dataclass(frozen=True, slots=True)
class Pair:
    """One step in vector kernels, and in plain torch with the same weights in single precision."""

    ours: Outputs
    theirs: Outputs

    @property
    def error(self) -> float:
        """Relative, of the logits."""
        return float((self.ours[0] - self.theirs[0]).norm() / self.theirs[0].norm())


def tiny(dtype: torch.dtype, **changes: Any) -> Any:
    return tiny_model(device=DEVICE.type, dtype=dtype, **({"vocab_size": 37, "num_layers": 1} | changes)).model


def models(dtype: torch.dtype, **changes: Any) -> tuple[Any, Any]:
    """The same numbers in `dtype` and in single precision."""
    half, exact = tiny(dtype, **changes), tiny(torch.float32, **changes)
    for ours, theirs in zip(half.module.parameters(), exact.module.parameters(), strict=True):
        if ours.dim() == 1:
            ours.data.add_(0.1 * torch.randn(ours.shape, generator=torch.Generator().manual_seed(5)).to(ours))
        theirs.data.copy_(ours)
    return half, exact


def steps(
    lengths: tuple[int, ...], count: int = 1, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Iterator[Pair]:
    half, exact = models(dtype, **changes)
    fast, plain = Decoding(half, lengths, dtype), Decoding(exact, lengths, torch.float32)
    fast.poison()
    rows = len(lengths)
    kernels = TritonKernels(fast.cache, num_heads=half.shape.num_heads, max_rows=rows, gemv_rows=rows)
    for _ in range(count):
        yield Pair(fast.vector_step(kernels), plain.step(TorchKernels(plain.cache)))
        plain.inputs.last_tokens.copy_(fast.inputs.last_tokens)  # the reference follows our tokens
        for name in ("positions", "sources"):
            assert torch.equal(fast.inputs.staging.device[name], plain.inputs.staging.device[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_stay_near_single_precision_and_choose_the_largest_logit(family: str) -> None:
    for step in steps((1, 30, 125), 2, **FAMILIES[family]):
        assert step.error < 3e-2
        assert torch.equal(step.ours[1][:, 0], step.ours[0].argmax(-1))
        assert step.ours[1][:, 1].all()


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_any_small_number_of_rows_in_float16(rows: int) -> None:
    (step,) = steps((5, 64, 65, 2)[:rows], dtype=torch.float16, num_layers=2)
    assert step.error < 5e-3


@pytest.mark.parametrize("tile", TILES)
def test_every_way_of_cutting_gives_the_same_step(tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(kind: MatrixKind, *_: int) -> Tile:
        return Tile(4, 1, 32) if kind == "o" and TILES[tile].abreast > 1 else TILES[tile]

    monkeypatch.setattr("worker.model.vector_step.tile_for", cut)
    (step,) = steps((9, 40))
    assert step.error < 3e-2


def test_a_long_row_is_merged_by_the_last_of_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = EarlyPlan(num_splits=5, late_splits=2, min_chunk=16, long_chunk=16, tile=16)
    monkeypatch.setattr("worker.model.vector_step.early_plan", lambda **_: plan)
    for step in steps((126, 20, 1), 2):
        assert step.error < 3e-2


def test_other_types_and_shapes_are_left_to_the_other_kernels() -> None:
    for changes, dtype in (({}, torch.float32), ({"head_dim": 12}, torch.bfloat16)):
        model = tiny(dtype, **changes)
        decoding = Decoding(model, (5,), dtype)
        kernels = TritonKernels(decoding.cache, num_heads=4, max_rows=1, gemv_rows=1)
        assert kernels.whole_step(model, decoding.inputs.views(1, WIDTH)) is None


def test_more_rows_than_the_limit_are_left_to_the_other_kernels() -> None:
    model = tiny(torch.bfloat16)
    decoding = Decoding(model, (5, 6), torch.bfloat16)
    kernels = TritonKernels(decoding.cache, num_heads=4, max_rows=2, gemv_rows=1)
    assert kernels.whole_step(model, decoding.inputs.views(2, WIDTH)) is None
    assert kernels.whole_step(model, decoding.inputs.views(1, WIDTH)) is not None
