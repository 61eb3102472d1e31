"""Which kernels a GPU gets: what a generation lacks is never asked of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from worker import step_kernels
from worker.kernels import device

CUDA = torch.device("cuda", 0)


class _Cache:
    """As much of a KV pool on a GPU as the choice looks at."""

    class storage:  # noqa: N801 - stands for a tensor
        device = CUDA
        shape = (1, 2, 1, 16, 1, 64)


@pytest.fixture
def limits_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A call that tells up to how many rows each way goes on a GPU of some capability."""

    def limits(capability: tuple[int, int]) -> tuple[int, int, int]:
        for function in (device.launches_programmatically, device.multiplies_in_groups):
            function.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        seen: dict[str, Any] = {}
        monkeypatch.setattr("worker.triton_kernels.TritonKernels", lambda *_, **given: seen.update(given))
        step_kernels.choose_kernels("auto", _Cache(), num_heads=1, max_rows=1)  # type: ignore[arg-type]
        return seen["gemv_rows"], seen["product_rows"], seen["block_rows"]

    yield limits
    for function in (device.launches_programmatically, device.multiplies_in_groups):
        function.cache_clear()


def test_hopper_gets_every_way(limits_on: Any) -> None:
    assert limits_on((9, 0)) == (step_kernels.GEMV_ROWS, step_kernels.PRODUCT_ROWS, step_kernels.BLOCK_ROWS)


def test_blackwell_has_no_groups_of_warps_as_hopper_has_them(limits_on: Any) -> None:
    assert limits_on((10, 0)) == (step_kernels.GEMV_ROWS, step_kernels.PRODUCT_ROWS, 0)


def test_ampere_cannot_overlap_launches(limits_on: Any) -> None:
    assert limits_on((8, 0)) == (0, 0, 0)


def test_a_triton_without_gluon_leaves_the_vector_kernels(limits_on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_kernels, "has_gluon", lambda: False)
    assert limits_on((9, 0)) == (step_kernels.GEMV_ROWS, 0, 0)
