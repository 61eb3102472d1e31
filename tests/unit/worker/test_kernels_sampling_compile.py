"""The sampling kernels compile for Hopper without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.compiled_offline import compiled_offline


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return compiled_offline("compile_sampling", tmp_path_factory.mktemp("triton"))


def test_every_launch_of_the_stage_compiles(compiled: list[dict[str, Any]]) -> None:
    assert [kernel["name"] for kernel in compiled] == ["survey", "weigh", "refine", "gather", "cut", "draw"]


def test_every_launch_starts_early_and_waits(compiled: list[dict[str, Any]]) -> None:
    # One that left without waiting would let the next one start before those ahead of it have finished.
    assert all(kernel["waits"] and kernel["launch_pdl"] for kernel in compiled)


def test_no_product_is_fused_with_a_sum(compiled: list[dict[str, Any]]) -> None:
    assert not any(kernel["fuses"] or kernel["may_fuse"] for kernel in compiled)
