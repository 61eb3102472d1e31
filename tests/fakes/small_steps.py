"""Decode steps of tiny models beside plain torch in single precision. Without a GPU kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.fakes.tiny_model import tiny_model
from tests.fakes.triton_interpreter import DEVICE
from worker.decode_inputs import DecodeInputs
from worker.decode_step import decode_step
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


class Decoding:
    """Rows in the middle of their answers, over a pool that holds NaN where nothing lives."""

    def __init__(self, model: Any, lengths: tuple[int, ...], dtype: torch.dtype, width: int = WIDTH) -> None:
        shape, self.model, self.lengths, self.width = model.shape, model, lengths, width
        self.cache = KVCache(
            num_layers=shape.num_layers,
            num_blocks=len(lengths) * self.width + 1,
            block_size=BLOCK_SIZE,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            device=DEVICE,
        )
        past = torch.randn(self.cache.storage.shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
        self.cache.storage.copy_(past.to(DEVICE))
        self.inputs = DecodeInputs(max_batch=len(lengths), max_blocks=self.width, block_size=BLOCK_SIZE, device=DEVICE)
        host = self.inputs.staging.writable()
        host["positions"][...] = [length - 1 for length in lengths]
        host["token_ids"][...] = [7 * row + 3 for row in range(len(lengths))]
        host["live"][...], host["sources"][...] = 1, -1
        for row in range(len(lengths)):
            host["block_tables"][row] = range(1 + row * self.width, 1 + (row + 1) * self.width)
        self.inputs.staging.upload()

    def poison(self) -> None:
        """NaN in the padding block and wherever no row's past lies."""
        self.cache.storage[:, :, 0] = torch.nan
        for row, length in enumerate(self.lengths):
            blocks = slice(1 + row * self.width, 1 + (row + 1) * self.width)
            self.cache.storage[:, :, blocks].view(*self.cache.storage.shape[:2], self.width * BLOCK_SIZE, -1)[
                :, :, length - 1 :
            ] = torch.nan

    def step(self, kernels: StepKernels) -> Outputs:
        with torch.inference_mode():
            return decode_step(self.model, kernels, self.inputs.views(len(self.lengths), self.width))

    def whole_step(self, kernels: TritonKernels) -> Outputs:
        with torch.inference_mode():
            outputs = kernels.whole_step(self.model, self.inputs.views(len(self.lengths), self.width))
        assert outputs is not None
        return outputs


@dataclass(frozen=True, slots=True)
class Pair:
    """One whole step in our kernels, and in plain torch with the same weights in single precision."""

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
    lengths: tuple[int, ...],
    count: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    *,
    limit: str = "gemv_rows",
    width: int = WIDTH,
    **changes: Any,
) -> Iterator[Pair]:
    half, exact = models(dtype, **changes)
    fast, plain = Decoding(half, lengths, dtype, width), Decoding(exact, lengths, torch.float32, width)
    fast.poison()
    rows = len(lengths)
    kernels = TritonKernels(fast.cache, num_heads=half.shape.num_heads, max_rows=rows, **{limit: rows})
    for _ in range(count):
        yield Pair(fast.whole_step(kernels), plain.step(TorchKernels(plain.cache)))
        plain.inputs.last_tokens.copy_(fast.inputs.last_tokens)  # the reference follows our tokens
        for name in ("positions", "sources"):
            assert torch.equal(fast.inputs.staging.device[name], plain.inputs.staging.device[name])
