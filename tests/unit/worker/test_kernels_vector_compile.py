"""The matrix-vector kernels as Hopper gets them, compiled without a GPU, at the shapes of the public models."""

from __future__ import annotations

from typing import Any

import pytest

from bench.shapes import SHAPES
from tests.fakes.compiled_offline import compiled_offline

MAX_SHARED_BYTES_OF_A_PRODUCT = 512
"""Room for one reduction. A change of layout would take kilobytes, and time."""

MAX_SHARED_BYTES_OF_SHORT_ATTENTION = 20 << 10


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return compiled_offline("compile_vectors", tmp_path_factory.mktemp("triton"), timeout_s=400)


@pytest.fixture(scope="module")
def products(compiled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [kernel for kernel in compiled if kernel["name"] == "_gemv"]


def test_a_layer_is_five_launches_and_the_rest_of_a_step_three(compiled: list[dict[str, Any]]) -> None:
    for width, attention in ((64, "_early_attention"), (16, "_short_attention")):
        case = ("llama-3.2-1b", 1, width)
        names = [kernel["name"] for kernel in compiled if (kernel["model"], kernel["rows"], kernel["width"]) == case]
        assert names == ["_embed_tokens", "_gemv", attention, *["_gemv"] * 3, "_gemv", "_row_best"]
    assert {kernel["model"] for kernel in compiled} == set(SHAPES)


def test_every_kernel_starts_early_waits_once_and_spills_nothing(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        assert kernel["launch_pdl"], kernel
        assert kernel["num_waits"] == 1, kernel
        assert kernel["stack_bytes"] == 0, kernel


def test_all_weights_are_requested_before_the_wait(products: list[dict[str, Any]]) -> None:
    for kernel in products:
        assert kernel["streamed_before_wait"] >= 4, kernel
        assert kernel["streamed_after_wait"] == 0, kernel


def test_no_weight_changes_threads(products: list[dict[str, Any]]) -> None:
    for kernel in products:
        assert kernel["shared_bytes"] <= MAX_SHARED_BYTES_OF_A_PRODUCT, kernel


def test_short_attention_exchanges_once_and_wants_little_shared_memory(compiled: list[dict[str, Any]]) -> None:
    found = [kernel for kernel in compiled if kernel["name"] == "_short_attention"]
    assert {kernel["model"] for kernel in found} <= {"smollm2-135m", "llama-3.2-1b", "qwen2.5-1.5b", "llama-2-7b"}
    for kernel in found:
        assert kernel["uses_tensor_cores"]
        assert kernel["barriers"] == 1, kernel
        assert kernel["shared_bytes"] <= MAX_SHARED_BYTES_OF_SHORT_ATTENTION, kernel
