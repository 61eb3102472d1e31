"""Decode steps in matrix-vector kernels on a real GPU: every public shape against torch in single precision."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from bench.shapes import SHAPES
from worker.decode_inputs import DecodeInputs
from worker.decode_step import decode_step
from worker.kernels.device import has_triton
from worker.kv_cache import KVCache
from worker.model.architecture import DecoderConfig
from worker.model.decoder import Decoder
from worker.model.load import randomise
from worker.step_kernels import Outputs, TorchKernels, choose_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and has_triton()), reason="needs a CUDA device and triton"),
]

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

    def __init__(self, model: Any, lengths: tuple[int, ...], width: int, *, kernels: Any = None) -> None:
        shape, dtype = model.shape, next(model.module.parameters()).dtype
        self.model, self.lengths, self.width = model, lengths, width
        sizes = {"num_layers": shape.num_layers, "num_blocks": len(lengths) * width + 1, "block_size": BLOCK_SIZE}
        self.cache = KVCache(
            **sizes, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=dtype, device=CUDA
        )
        past = torch.randn(self.cache.storage.shape, generator=torch.Generator(CUDA).manual_seed(0), device=CUDA)
        self.cache.storage.copy_(past.to(torch.bfloat16))
        del past
        self.kernels = kernels or choose_kernels(
            "triton", self.cache, num_heads=shape.num_heads, max_rows=len(lengths), gemv_rows=len(lengths)
        )
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
def check(name: str, lengths: tuple[int, ...], width: int, dtype: torch.dtype, num_steps: int = 3) -> None:
    """A graph of our step, replayed, against eager steps in single precision that follow our tokens."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = two_layers(name, dtype)
    ours = Decoding(model, lengths, width)
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


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_steps_of_ragged_rows_stay_near_single_precision(name: str, rows: int) -> None:
    check(name, LENGTHS[:rows], 20, torch.bfloat16)


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "smollm2-135m"])
def test_steps_in_float16(name: str) -> None:
    check(name, LENGTHS[:2], 20, torch.float16)


@pytest.mark.parametrize("lengths", [(512,), (513, 60), (2048,), (2049, 700, 3), (3900,)])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen2.5-1.5b"])
def test_steps_at_every_length_in_a_wide_tier(name: str, lengths: tuple[int, ...]) -> None:
    check(name, lengths, 256, torch.bfloat16)


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.2-1b"])
@torch.inference_mode()
def test_a_replayed_graph_gives_the_bits_of_eager_steps(name: str) -> None:
    model = two_layers(name, torch.bfloat16)
    replayed, eager = Decoding(model, LENGTHS, 20), Decoding(model, LENGTHS, 20)
    graph, (logits, chosen) = replayed.capture()
    for _ in range(20):
        graph.replay()
        expected, expected_chosen = eager.step()
        assert torch.equal(logits, expected)
        assert torch.equal(chosen, expected_chosen)


@torch.inference_mode()
def test_a_rows_logits_do_not_depend_on_nan_in_another_rows_past() -> None:
    model = two_layers("llama-3.2-1b", torch.bfloat16)
    clean, poisoned = Decoding(model, LENGTHS, 20), Decoding(model, LENGTHS, 20)
    poisoned.cache.storage[:, :, poisoned.tables[0].to(CUDA)] = torch.nan
    (ours, chosen), (theirs, _) = poisoned.step(), clean.step()
    assert torch.equal(ours[1:], theirs[1:])
    assert chosen[:, 1].tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "lengths"), [("smollm2-135m", (30,)), ("llama-3.2-1b", (30, 5)), ("smollm2-135m", (2040, 9))]
)
@torch.inference_mode()
def test_256_replays_back_to_back_give_the_same_tokens_16_times(name: str, lengths: tuple[int, ...]) -> None:
    decoding = Decoding(model_of(name, torch.bfloat16), lengths, 160)
    start = decoding.cache.storage.clone()
    graph, (logits, _) = decoding.capture()
    ends = []
    for _ in range(16):
        decoding.cache.storage.copy_(start)
        decoding.reset()
        for _ in range(256):
            graph.replay()
        # The keys of every token are in the pool: a single other token would leave another sum.
        pool = decoding.cache.storage.view(torch.int16)
        ends.append((decoding.inputs.last_tokens.clone(), logits.clone(), pool.long().sum()))
    for tokens, last_logits, pool_sum in ends[1:]:
        assert torch.equal(tokens, ends[0][0])
        assert torch.equal(last_logits, ends[0][1])
        assert torch.equal(pool_sum, ends[0][2])
