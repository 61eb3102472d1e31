"""The decoder over fused kernels on a real GPU: two layers of every public shape against torch, eagerly and replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.shapes import SHAPES
from worker.config import Kernels
from worker.decode_inputs import DecodeInputs
from worker.decode_step import decode_step
from worker.kernels.device import has_triton
from worker.kv_cache import KVCache
from worker.model.architecture import DecoderConfig
from worker.model.decoder import Decoder
from worker.model.load import randomise
from worker.step_kernels import StepKernels, TorchKernels, choose_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and has_triton()), reason="needs a CUDA device and triton"),
]

CUDA = torch.device("cuda")
BLOCK_SIZE, WIDTH = 16, 40
LENGTHS = (1, 15, 16, 17, 255, 256, 257, 600)


def two_layers(name: str, dtype: torch.dtype) -> Any:
    from worker.causal_lm import NativeCausalLM

    config = SHAPES[name] | {"num_hidden_layers": 2, "vocab_size": 4096}
    decoder = Decoder(DecoderConfig.from_dict(config), dtype=dtype, device=CUDA).eval()
    randomise(decoder, 0)
    for parameter_name, parameter in decoder.named_parameters():
        if parameter_name.endswith(("norm", "bias")):
            parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
    return NativeCausalLM(decoder)


class Decoding:
    """Some rows in the middle of their answers, over a pool that holds NaN where nothing lives."""

    def __init__(self, model: Any, kernels: Kernels, lengths: tuple[int, ...] = LENGTHS) -> None:
        shape = model.shape
        dtype = next(model.module.parameters()).dtype
        self.model, self.rows = model, len(lengths)
        self.cache = KVCache(
            num_layers=shape.num_layers,
            num_blocks=len(lengths) * WIDTH + 1,
            block_size=BLOCK_SIZE,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            device=CUDA,
        )
        generator = torch.Generator(CUDA).manual_seed(0)
        self.cache.storage.normal_(generator=generator)
        self.kernels: StepKernels = choose_kernels(
            kernels,
            self.cache,
            num_heads=shape.num_heads,
            max_rows=self.rows,
        )
        self.inputs = DecodeInputs(max_batch=self.rows, max_blocks=WIDTH, block_size=BLOCK_SIZE, device=CUDA)
        self.reset(lengths)
        self.cache.storage[:, :, 0] = torch.nan
        for row, length in enumerate(lengths):
            table = self.inputs.staging.device["block_tables"][row].long()
            flat = self.cache.storage[:, :, table].flatten(2, 3)
            flat[:, :, length - 1 :] = torch.nan
            self.cache.storage[:, :, table] = flat.unflatten(2, (WIDTH, BLOCK_SIZE))

    def reset(self, lengths: tuple[int, ...]) -> None:
        host = self.inputs.staging.writable()
        host["positions"][...] = [length - 1 for length in lengths]
        host["token_ids"][...] = [7 * row + 3 for row in range(self.rows)]
        host["live"][...], host["sources"][...] = 1, -1
        for row in range(self.rows):
            host["block_tables"][row] = range(1 + row * WIDTH, 1 + (row + 1) * WIDTH)
        self.inputs.staging.upload()

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            return decode_step(self.model, self.kernels, self.inputs.views(self.rows, WIDTH))


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("name", SHAPES)
def test_fused_steps_in_single_precision_equal_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    model = two_layers(name, torch.float32)
    fused, plain = Decoding(model, "triton"), Decoding(model, "torch")
    assert isinstance(plain.kernels, TorchKernels)
    for _ in range(3):
        (ours, ours_chosen), (theirs, theirs_chosen) = fused.step(), plain.step()
        assert relative(ours, theirs) < 1e-4
        assert torch.equal(ours_chosen, theirs_chosen)
    assert torch.equal(fused.inputs.staging.device["positions"], plain.inputs.staging.device["positions"])


@pytest.mark.parametrize("name", SHAPES)
def test_fused_steps_in_half_precision_are_as_near_to_single_precision_as_torchs(name: str) -> None:
    exact = Decoding(two_layers(name, torch.float32), "torch").step()[0]
    model = two_layers(name, torch.bfloat16)
    ours, theirs = Decoding(model, "triton").step()[0], Decoding(model, "torch").step()[0]
    assert relative(ours, exact) < 1.2 * relative(theirs, exact) + 1e-3
    assert ours.isfinite().all()


@pytest.mark.parametrize("name", SHAPES)
def test_a_replayed_graph_gives_the_bits_of_eager_steps(name: str) -> None:
    model = two_layers(name, torch.bfloat16)
    replayed, eager = Decoding(model, "triton"), Decoding(model, "triton")
    replayed.step()
    replayed.reset(LENGTHS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, _ = replayed.step()
    for _ in range(20):
        graph.replay()
        assert torch.equal(logits, eager.step()[0])


@pytest.mark.parametrize("name", SHAPES)
def test_a_rows_logits_do_not_depend_on_nan_in_another_rows_past(name: str) -> None:
    model = two_layers(name, torch.bfloat16)
    clean, poisoned = Decoding(model, "triton"), Decoding(model, "triton")
    poisoned.cache.storage[:, :, 1 + 4 * WIDTH : 1 + 5 * WIDTH] = torch.nan
    ours, chosen = poisoned.step()
    others = torch.arange(len(LENGTHS), device=CUDA) != 4
    assert torch.equal(ours[others], clean.step()[0][others])
    assert chosen[:, 1].tolist() == [int(row != 4) for row in range(len(LENGTHS))]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("count", [1, 17, 300])
def test_prompts_over_fused_kernels_equal_torch(name: str, count: int) -> None:
    model = two_layers(name, torch.float32)
    token_ids = torch.randint(4096, (count,), device=CUDA, generator=torch.Generator(CUDA).manual_seed(1))
    positions = torch.arange(count, device=CUDA)
    slots = positions + BLOCK_SIZE
    last = torch.tensor([count - 1], device=CUDA)
    outputs, caches = [], []
    both: tuple[Kernels, ...] = ("triton", "torch")
    for kernels in both:
        decoding = Decoding(model, kernels)
        with torch.inference_mode():
            attend = decoding.kernels.fresh(slots=slots)
            outputs.append(decoding.kernels.greedy(model.compute(token_ids, positions, attend, last)))
        caches.append(decoding.cache.storage[:, :, 1 : 1 + -(-count // BLOCK_SIZE)].nan_to_num(0.0))
    assert relative(outputs[0][0], outputs[1][0]) < 1e-3
    assert relative(caches[0], caches[1]) < 1e-3
