"""The fixed-order kernels compile for Hopper without a GPU, into the instructions that their order rests on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.compiled_offline import compiled_offline

SHARED_BYTES_OF_A_HOPPER_SM = 227 << 10
SHAPES = ("llama-3.2-1b", "qwen2.5-1.5b", "head of 256")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return compiled_offline("compile_fixed_order", tmp_path_factory.mktemp("triton"), *SHAPES, timeout_s=280)


def named(compiled: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [kernel for kernel in compiled if kernel["name"] == name]


def test_no_multiplication_is_fused_with_an_addition(compiled: list[dict[str, Any]]) -> None:
    assert {kernel["name"] for kernel in compiled} == {
        *("_fixed_order_matmul", "_norm_rows", "_turn_and_store", "_row_slots"),
        *("_fixed_order_attention", "_merge_splits"),
    }
    products = ("_fixed_order_matmul", "_fixed_order_attention")  # in single precision they are made of such pairs
    assert not any(kernel["fuses"] for kernel in compiled if kernel["dtype"] != "float32")
    assert not any(kernel["fuses"] for kernel in compiled if kernel["name"] not in products)


def test_products_of_any_number_of_rows_add_sixteen_inputs_at_a_time(compiled: list[dict[str, Any]]) -> None:
    tiles = [kernel["tiles"] for kernel in named(compiled, "_fixed_order_matmul") if kernel["dtype"] != "float32"]
    assert {tile for found in tiles for tile in found} == {f"m64n{rows}k16" for rows in (16, 32, 64, 128)}
    assert all(len(found) == 1 for found in tiles)


def test_attention_has_one_instruction_in_both_phases(compiled: list[dict[str, Any]]) -> None:
    kernels = [kernel for kernel in named(compiled, "_fixed_order_attention") if kernel["dtype"] != "float32"]
    assert all(kernel["older_tiles"] == ["m16n8k16"] and not kernel["tiles"] for kernel in kernels)


def test_every_kernel_starts_early_waits_and_fits(compiled: list[dict[str, Any]]) -> None:
    assert all(kernel["waits"] and kernel["launch_pdl"] for kernel in compiled)
    assert all(kernel["shared_bytes"] <= SHARED_BYTES_OF_A_HOPPER_SM for kernel in compiled)
