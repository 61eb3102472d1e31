"""Decode steps in matrix-vector kernels on a real GPU: every public shape against torch in single precision."""

from __future__ import annotations

import pytest
import torch

from bench.shapes import SHAPES
from tests.fakes.whole_steps import CUDA, LENGTHS, Decoding, check, model_of, two_layers
from worker.kernels.device import has_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and has_triton()), reason="needs a CUDA device and triton"),
]


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_steps_of_ragged_rows_stay_near_single_precision(name: str, rows: int) -> None:
    check(name, LENGTHS[:rows], 20, torch.bfloat16, way="vector")


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "smollm2-135m"])
def test_steps_in_float16(name: str) -> None:
    check(name, LENGTHS[:2], 20, torch.float16, way="vector")


@pytest.mark.parametrize("length", [1, 2, 17, 128, 129, 200, 253])
@pytest.mark.parametrize("name", SHAPES)
def test_a_row_of_any_length_in_a_short_tier(name: str, length: int) -> None:
    check(name, (length,), 16, torch.bfloat16, way="vector")


@pytest.mark.parametrize("length", [1, 128, 255, 256, 257, 400, 509])
@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.2-1b"])
def test_a_row_of_any_length_in_the_next_tier(name: str, length: int) -> None:
    check(name, (length,), 32, torch.bfloat16, way="vector")


def test_a_row_of_a_short_tier_in_float16() -> None:
    check("qwen2.5-1.5b", (200,), 16, torch.float16, way="vector")


@pytest.mark.parametrize("lengths", [(512,), (513, 60), (2048,), (2049, 700, 3), (3900,)])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen2.5-1.5b"])
def test_steps_at_every_length_in_a_wide_tier(name: str, lengths: tuple[int, ...]) -> None:
    check(name, lengths, 256, torch.bfloat16, way="vector")


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.2-1b"])
@torch.inference_mode()
def test_a_replayed_graph_gives_the_bits_of_eager_steps(name: str) -> None:
    model = two_layers(name, torch.bfloat16)
    replayed, eager = Decoding(model, LENGTHS, 20, way="vector"), Decoding(model, LENGTHS, 20, way="vector")
    graph, (logits, chosen) = replayed.capture()
    for _ in range(20):
        graph.replay()
        expected, expected_chosen = eager.step()
        assert torch.equal(logits, expected)
        assert torch.equal(chosen, expected_chosen)


@torch.inference_mode()
def test_a_rows_logits_do_not_depend_on_nan_in_another_rows_past() -> None:
    model = two_layers("llama-3.2-1b", torch.bfloat16)
    clean, poisoned = Decoding(model, LENGTHS, 20, way="vector"), Decoding(model, LENGTHS, 20, way="vector")
    poisoned.cache.storage[:, :, poisoned.tables[0].to(CUDA)] = torch.nan
    (ours, chosen), (theirs, _) = poisoned.step(), clean.step()
    assert torch.equal(ours[1:], theirs[1:])
    assert chosen[:, 1].tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "lengths", "width", "count"),
    [
        ("smollm2-135m", (30,), 160, 256),
        ("llama-3.2-1b", (30, 5), 160, 256),
        ("smollm2-135m", (2040, 9), 160, 256),
        ("smollm2-135m", (5,), 16, 250),
        ("llama-3.2-1b", (5,), 16, 250),
    ],
)
@torch.inference_mode()
def test_replays_back_to_back_give_the_same_tokens_16_times(
    name: str, lengths: tuple[int, ...], width: int, count: int
) -> None:
    decoding = Decoding(model_of(name, torch.bfloat16), lengths, width, way="vector")
    start = decoding.cache.storage.clone()
    graph, (logits, _) = decoding.capture()
    ends = []
    for _ in range(16):
        decoding.cache.storage.copy_(start)
        decoding.reset()
        for _ in range(count):
            graph.replay()
        # The keys of every token are in the pool: a single other token would leave another sum.
        pool = decoding.cache.storage.view(torch.int16)
        ends.append((decoding.inputs.last_tokens.clone(), logits.clone(), pool.long().sum()))
    for tokens, last_logits, pool_sum in ends[1:]:
        assert torch.equal(tokens, ends[0][0])
        assert torch.equal(last_logits, ends[0][1])
        assert torch.equal(pool_sum, ends[0][2])
