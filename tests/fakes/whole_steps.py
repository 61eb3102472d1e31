"""Whole decode steps on a GPU beside torch in single precision, for tests of every way of computing them."""

from __future__ import annotations

import gc
from typing import Any

import torch

from bench.kernels import Way, limits_of
from bench.shapes import SHAPES
from worker.decode_inputs import DecodeInputs
from worker.decode_step import decode_step
from worker.kv_cache import KVCache
from worker.model.architecture import DecoderConfig
from worker.model.decoder import Decoder
from worker.model.load import randomise
from worker.step_kernels import Outputs, TorchKernels, choose_kernels

CUDA = torch.device("cuda")
BLOCK_SIZE = 16
LENGTHS = (200, 1, 17, 256)
TOLERANCE = {torch.bfloat16: 3.5e-2, torch.float16: 5e-3}
CLEAR_GAP = 0.2
"""Between the two best logits, in standard deviations of them all: no rounding turns that around."""


def model_of(name: str, dtype: torch.dtype, **changes: Any) -> Any:
    from worker.causal_lm import NativeCausalLM

    decoder = Decoder(DecoderConfig.from_dict(SHAPES[name] | changes), dtype=dtype, device=CUDA).eval()
    randomise(decoder, 0)
    for parameter_name, parameter in decoder.named_parameters():
        if parameter_name.endswith(("norm", "bias")):
            generator = torch.Generator(CUDA).manual_seed(len(parameter_name))
            parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator, device=CUDA))
    return NativeCausalLM(decoder)


def two_layers(name: str, dtype: torch.dtype) -> Any:
    return model_of(name, dtype, num_hidden_layers=2, vocab_size=4096)


def widened(model: Any, name: str) -> Any:
    """The same weights in single precision."""
    wide = two_layers(name, torch.float32)
    for ours, theirs in zip(model.module.parameters(), wide.module.parameters(), strict=True):
        theirs.data.copy_(ours)
    return wide


class Decoding:
    """Rows in the middle of their answers."""

    def __init__(self, model: Any, lengths: tuple[int, ...], width: int, *, way: Way = "shipped") -> None:
        shape, dtype = model.shape, next(model.module.parameters()).dtype
        self.model, self.lengths, self.width = model, lengths, width
        sizes = {"num_layers": shape.num_layers, "num_blocks": len(lengths) * width + 1, "block_size": BLOCK_SIZE}
        self.cache = KVCache(
            **sizes, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=dtype, device=CUDA
        )
        past = torch.randn(self.cache.storage.shape, generator=torch.Generator(CUDA).manual_seed(0), device=CUDA)
        self.cache.storage.copy_(past.to(torch.bfloat16))
        del past
        limits = limits_of(way, len(lengths))
        self.kernels = choose_kernels("triton", self.cache, num_heads=shape.num_heads, max_rows=len(lengths), **limits)
        self.inputs = DecodeInputs(max_batch=len(lengths), max_blocks=width, block_size=BLOCK_SIZE, device=CUDA)
        order = torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(1)) + 1
        self.tables = order.view(len(lengths), width)
        self.reset()

    def reset(self) -> None:
        host = self.inputs.staging.writable()
        host["positions"][...] = [length - 1 for length in self.lengths]
        host["token_ids"][...] = [7 * row + 3 for row in range(len(self.lengths))]
        host["live"][...], host["sources"][...] = 1, -1
        host["block_tables"][...] = self.tables.numpy()
        self.inputs.staging.upload()

    def poison(self) -> None:
        """NaN in the padding block and in every slot that is no row's past."""
        self.cache.storage[:, :, 0] = torch.nan
        for row, length in enumerate(self.lengths):
            table = self.tables[row].to(CUDA)
            flat = self.cache.storage[:, :, table].flatten(2, 3)
            flat[:, :, length - 1 :] = torch.nan
            self.cache.storage[:, :, table] = flat.unflatten(2, (self.width, BLOCK_SIZE))

    def step(self) -> Outputs:
        with torch.inference_mode():
            return decode_step(self.model, self.kernels, self.inputs.views(len(self.lengths), self.width))

    def capture(self) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        self.step()
        self.reset()
        torch.cuda.synchronize()
        gc.collect()  # nothing may be freed on the device while it captures
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.step()
        return graph, outputs


@torch.inference_mode()
def check(name: str, lengths: tuple[int, ...], width: int, dtype: torch.dtype, *, way: Way, num_steps: int = 3) -> None:
    """A graph of our step, replayed, against eager steps in single precision that follow our tokens."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = two_layers(name, dtype)
    ours = Decoding(model, lengths, width, way=way)
    wide = widened(model, name)
    theirs = Decoding(wide, lengths, width)
    theirs.kernels = TorchKernels(theirs.cache)
    assert ours.kernels.whole_step(model, ours.inputs.views(len(lengths), width)) is not None
    ours.reset()
    graph, (logits, chosen) = ours.capture()
    ours.poison()
    for _ in range(num_steps):
        logits.fill_(torch.nan)
        graph.replay()
        expected, _ = theirs.step()
        theirs.inputs.last_tokens.copy_(ours.inputs.last_tokens)
        error = float((logits - expected).norm() / expected.norm())
        assert error < TOLERANCE[dtype], error
        best = expected.topk(2, dim=-1).values
        clear = best[:, 0] - best[:, 1] > CLEAR_GAP * expected.std(dim=-1)
        assert torch.equal(chosen[clear, 0], expected.argmax(-1)[clear])
        assert torch.equal(chosen[:, 0], logits.argmax(-1))
        assert chosen[:, 1].all()
    assert torch.equal(ours.inputs.staging.device["positions"], theirs.inputs.staging.device["positions"])
    for row, length in enumerate(lengths):
        places = range(length - 1, length - 1 + num_steps)
        blocks, offsets = self_places(ours, row, places)
        found, wanted = (d.cache.storage[:, :, blocks, offsets].float() for d in (ours, theirs))
        assert float((found - wanted).norm() / wanted.norm()) < TOLERANCE[dtype]


def self_places(decoding: Decoding, row: int, places: range) -> tuple[list[int], list[int]]:
    table = decoding.tables[row].tolist()
    return [table[place // BLOCK_SIZE] for place in places], [place % BLOCK_SIZE for place in places]
