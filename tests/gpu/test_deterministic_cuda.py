"""Deterministic mode on a real GPU: bit-equal logits over batch, chunking, tier, runner, and from process to process."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.shapes import SHAPES
from tests.fakes.logit_record import LogitRecord
from tests.fakes.tiny_model import tiny_engine
from worker.causal_lm import NativeCausalLM
from worker.engine import Engine
from worker.kernels.device import has_triton
from worker.load_causal_lm import ServedModel
from worker.model.architecture import DecoderConfig
from worker.model.decoder import Decoder
from worker.model.load import randomise
from worker.request import GenerateRequest
from worker.sampling import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and has_triton()), reason="needs a CUDA device and triton"),
]

VOCAB = 8192
TIERS = (64, 256, 512, 1024)


def served(name: str = "llama-3.2-1b", dtype: torch.dtype = torch.bfloat16, layers: int = 3) -> ServedModel:
    config = SHAPES[name] | {"num_hidden_layers": layers, "vocab_size": VOCAB, "max_position_embeddings": 1024}
    decoder = Decoder(DecoderConfig.from_dict(config), dtype=dtype, device=torch.device("cuda")).eval()
    randomise(decoder, 0)
    generator = torch.Generator("cuda").manual_seed(1)
    for parameter_name, parameter in decoder.named_parameters():
        if parameter_name.endswith(("norm", "bias")):
            parameter.uniform_(0.5, 1.5, generator=generator)
    return ServedModel(NativeCausalLM(decoder), (2,), {}, "native")


def engine(model: ServedModel, **changes: Any) -> Engine:
    values: dict[str, Any] = {
        "device": "cuda",
        "deterministic": True,
        "block_size": 16,
        "prefill_chunk": 256,
        "max_batch": 256,
        "kv_cache_bytes": 2 << 30,
        "tiers": TIERS,
        "graphs": "off",
    }
    return tiny_engine(model, **(values | changes))


def captured(model: ServedModel, **changes: Any) -> Engine:
    """With graphs, and a few buckets so that capturing is quick."""
    made = engine(model, graphs="auto", **changes)
    while made.prepare_next():
        pass
    return made


def requests(count: int, *, seed: int = 1, **params: Any) -> list[GenerateRequest]:
    rng = random.Random(seed)
    values: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **params}
    lengths = [1, 15, 16, 17, 63, 130, 255, 256, 257, 600]
    return [
        GenerateRequest(
            request_id=str(n),
            prompt_token_ids=tuple(rng.choices(range(3, VOCAB), k=lengths[n % len(lengths)])),
            sampling=SamplingParams(**values),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-3.2-1b", torch.bfloat16),
        ("smollm2-135m", torch.bfloat16),
        ("qwen2.5-1.5b", torch.float16),
        ("qwen3-8b", torch.bfloat16),
        ("smollm2-135m", torch.float32),
    ],
)
def test_batch_chunking_tier_and_runner_leave_every_bit_alone(name: str, dtype: torch.dtype) -> None:
    model, record, asked = served(name, dtype, layers=2), LogitRecord(), requests(10)
    eager = engine(model)
    alone: dict[tuple[str, int], list[int]] = {}
    for one in asked:
        alone |= record.run(eager, [one])
    for made in (
        engine(model),
        engine(model, prefill_chunk=64, prefix_cache=False),
        captured(model, buckets=(1, 2, 8, 256)),
        captured(model, buckets=(1, 3, 256), prefill_chunk=128, tiers=(128, 300, 700, 1024)),
    ):
        assert record.run(made, asked) == alone
    assert {"eager", "graph"} <= record.runners
    assert record.num_compared > 200


@pytest.mark.parametrize("batch", [2, 8, 32, 256])
def test_a_seeded_request_is_itself_in_any_batch(batch: int) -> None:
    model, record = served(), LogitRecord()
    sampled = requests(batch, temperature=1.0, seed=5, top_p=0.9, presence_penalty=0.3)
    made = captured(model, buckets=(1, 2, 8, 32, 256))
    together = record.run(made, sampled)
    for one in sampled[:: max(batch // 6, 1)]:
        alone = record.run(made, [one])
        assert alone[one.request_id, 0] == together[one.request_id, 0]
    assert record.num_compared > 0


def test_generated_tokens_have_the_bits_of_prompt_tokens() -> None:
    model, record = served(), LogitRecord()
    made = captured(model, buckets=(1, 8, 256))
    asked = requests(1, max_tokens=30)[0]
    answer = record.run(made, [asked])["0", 0]
    for taken in range(1, 30, 4):
        resumed = GenerateRequest(
            request_id="0",
            prompt_token_ids=asked.prompt_token_ids,
            sampling=asked.sampling,
            delivered=(tuple(answer[:taken]),),
        )
        assert record.run(made, [resumed])["0", 0] == answer[taken:]


def test_every_row_tile_agrees_on_this_device() -> None:
    from worker.deterministic.triton_model import verify_products

    for name in ("llama-3.2-1b", "qwen3-8b", "smollm2-135m"):
        tiles = verify_products(served(name, layers=1).model.module)  # type: ignore[arg-type]
        assert {found.sizes for found in tiles.values()} == {(16, 32, 64, 128)}


def test_the_bits_are_the_same_in_another_process() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", "from tests.gpu.test_deterministic_cuda import digest; print(digest())"],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout.strip()
        for _ in range(2)
    }
    assert digests == {digest()}


def digest() -> str:
    """Of the logits of a few requests."""
    record = LogitRecord()
    record.run(engine(served()), requests(4))
    found = hashlib.sha256()
    for tokens in sorted(record.bits):
        found.update(record.bits[tokens])
    return found.hexdigest()
