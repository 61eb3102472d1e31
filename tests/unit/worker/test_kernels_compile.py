"""Every kernel compiles for Hopper without a GPU, at the shapes of the public models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.compiled_offline import compiled_offline

SHARED_BYTES_OF_A_HOPPER_SM = 227 << 10


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return compiled_offline("compile_kernels", tmp_path_factory.mktemp("triton"))


def test_every_kernel_of_a_step_compiles_for_every_shape(compiled: list[dict[str, Any]]) -> None:
    assert {kernel["name"] for kernel in compiled} == {
        *("_rms_norm", "_silu_mul", "_rope_and_cache", "_decode_attention"),
        *("_prefill_attention", "_merge_splits", "_block_best", "_row_best", "_pick_tokens"),
    }


def test_every_kernel_starts_early_and_waits(compiled: list[dict[str, Any]]) -> None:
    assert all(kernel["waits"] and kernel["launch_pdl"] for kernel in compiled)


def test_two_programs_of_the_attention_share_a_multiprocessor(compiled: list[dict[str, Any]]) -> None:
    assert all(2 * kernel["shared_bytes"] <= SHARED_BYTES_OF_A_HOPPER_SM for kernel in compiled)


def test_attention_in_half_precision_uses_tensor_cores_and_asynchronous_copies(compiled: list[dict[str, Any]]) -> None:
    attention = [kernel for kernel in compiled if kernel["name"] == "_decode_attention"]
    assert all(kernel["copies_asynchronously"] for kernel in attention)
    in_half_precision = attention[:-2]  # the last shape is in single precision
    assert all(kernel["uses_tensor_cores"] for kernel in in_half_precision)
