"""The decoder out of fixed-order kernels, under Triton's interpreter: the same model, and the same bits in every phase."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fakes.fixed_order_interpreter import products_like_instructions, short_splits  # noqa: F401
from tests.fakes.tiny_model import tiny_model
from tests.fakes.triton_interpreter import DEVICE
from worker.attention.prefill import PrefillSegment
from worker.causal_lm import NativeCausalLM
from worker.decode_inputs import DecodeInputs
from worker.decode_step import decode_step
from worker.deterministic.triton_kernels import TritonFixedOrderKernels
from worker.deterministic.triton_model import TritonFixedOrderCausalLM
from worker.kv_cache import KVCache
from worker.step_kernels import TorchKernels

BLOCK_SIZE, COUNT = 4, 38
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen3, all biases": {"qk_norm": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "num_kv_heads": 1},
}
TOKENS = torch.randint(4, 200, (COUNT,), generator=torch.Generator().manual_seed(2))


class Run:
    """One sequence over a pool of its own."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = KVCache(
            num_layers=2,
            num_blocks=32,
            block_size=BLOCK_SIZE,
            num_kv_heads=model.shape.num_kv_heads,
            head_dim=model.shape.head_dim,
            dtype=torch.float32,
            device=DEVICE,
        )
        self.cache.storage.fill_(torch.nan)
        self.table = torch.arange(1, 1 + -(-COUNT // BLOCK_SIZE), dtype=torch.int32, device=DEVICE)
        self.kernels: Any = (
            TorchKernels(self.cache)
            if isinstance(model, NativeCausalLM)
            else TritonFixedOrderKernels(self.cache, num_heads=model.shape.num_heads, max_rows=2, max_tokens=64)
        )

    def slots(self, start: int, stop: int) -> torch.Tensor:
        places = torch.arange(start, stop, device=DEVICE)
        return self.table[places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE

    def prefill(self, start: int, stop: int, *, how: str = "segments") -> torch.Tensor:
        """Logits of tokens [start, stop)."""
        positions, slots = torch.arange(start, stop, device=DEVICE), self.slots(start, stop)
        if how == "fresh":
            attention = self.kernels.fresh(slots=slots)
        elif how == "chunk":
            context = torch.tensor([stop], device=DEVICE)
            attention = self.kernels.chunk(
                slots=slots, positions=positions, block_table=self.table, context_len=context
            )
        else:
            segments = [PrefillSegment(0, start, stop - start, self.table)]
            attention = self.kernels.segments(slots=slots, segments=segments)
        logits: torch.Tensor = self.model.compute(TOKENS[start:stop].to(DEVICE), positions, attention, None)
        return logits

    def decode(self, position: int) -> torch.Tensor:
        """Logits of the token at `position`, beside a padding row."""
        inputs = DecodeInputs(max_batch=2, max_blocks=len(self.table), block_size=BLOCK_SIZE, device=DEVICE)
        host = inputs.staging.writable()
        host["token_ids"][0], host["positions"][0], host["live"][0] = int(TOKENS[position]), position, 1
        host["block_tables"][0] = self.table.cpu().numpy()
        inputs.staging.upload()
        logits, _ = decode_step(self.model, self.kernels, inputs.views(2, len(self.table)))
        assert int(inputs.last_tokens[0]) == int(logits[0].argmax())
        return logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_phase_and_every_cut_gives_the_same_bits(family: str) -> None:
    native = tiny_model(**FAMILIES[family], device=DEVICE.type).model
    assert isinstance(native, NativeCausalLM)
    model = TritonFixedOrderCausalLM(native.decoder)
    whole = Run(model).prefill(0, COUNT, how="fresh")
    torch.testing.assert_close(whole, Run(native).prefill(0, COUNT), rtol=1e-3, atol=1e-3)
    cut = Run(model)
    assert torch.equal(cut.prefill(0, 3), whole[:3])
    assert torch.equal(cut.prefill(3, 32, how="chunk"), whole[3:32])
    for position in range(32, COUNT):
        assert torch.equal(cut.decode(position), whole[position])
