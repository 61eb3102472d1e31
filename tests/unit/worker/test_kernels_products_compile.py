"""The tensor-core kernels of decode steps as Hopper gets them, compiled without a GPU.

They are written in Gluon, which nothing interprets; what they compute is tested on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.compiled_offline import compiled_offline

MODELS = ("smollm2-135m", "qwen2.5-1.5b")
SHARED_BYTES_OF_A_HOPPER_PROGRAM = 227 << 10
MAX_SHARED_BYTES_OF_A_SUM = 8 << 10
"""Room for the sums of warps. A change of layout would take the size of the weights."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return compiled_offline("compile_products", tmp_path_factory.mktemp("triton"), *MODELS, timeout_s=400)


@pytest.mark.parametrize(("width", "attention"), [(16, "_early_attention"), (256, "_decode_attention")])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_for_a_few_rows_is_five_launches_a_layer_and_one_in_blocks_seven(
    compiled: list[dict[str, Any]], model: str, width: int, attention: str
) -> None:
    names = {
        way: [
            kernel["name"]
            for kernel in compiled
            if (kernel["model"], kernel["way"], kernel["width"]) == (model, way, width)
        ]
        for way in ("rows", "blocks")
    }
    product, norm = "_rows_product", "_rms_norm"
    assert names["rows"] == ["_embed_tokens", product, attention, *[product] * 4, "_row_best"]
    product = "_block_product"
    layer = [product, attention, product, norm, product, product, norm]
    assert names["blocks"] == ["_embed_tokens", *layer, product, "_row_best"]


def test_every_kernel_starts_early_waits_once_and_spills_nothing(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        assert kernel["launch_pdl"], kernel
        assert kernel["num_waits"] == 1, kernel
        assert kernel["stack_bytes"] == 0, kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES_OF_A_HOPPER_PROGRAM, kernel


def test_products_for_a_few_rows_ask_for_weights_before_the_wait_and_never_move_them(
    compiled: list[dict[str, Any]],
) -> None:
    products = [kernel for kernel in compiled if kernel["name"] == "_rows_product"]
    for kernel in products:
        assert kernel["streamed_before_wait"] >= 4, kernel
        assert kernel["uses_tensor_cores"], kernel
        assert kernel["shared_bytes"] <= MAX_SHARED_BYTES_OF_A_SUM, kernel


def test_products_in_blocks_are_fed_by_the_copy_engine(compiled: list[dict[str, Any]]) -> None:
    products = [kernel for kernel in compiled if kernel["name"] == "_block_product"]
    for kernel in products:
        assert kernel["uses_tensor_cores"], kernel
        assert kernel["copies_asynchronously"], kernel
        assert kernel["streamed_before_wait"] == kernel["streamed_after_wait"] == 0, kernel
