"""Replays a graph against eager execution, with random inputs and poisoned padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from worker.graphs.captured import CapturedGraph
from worker.graphs.region import CaptureRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a replay may be from eager, per element: atol + rtol * |eager|. Integers must be equal."""

    rtol: float
    atol: float


TOLERANCES = {
    torch.float64: Tolerance(rtol=1e-10, atol=1e-10),
    torch.float32: Tolerance(rtol=1e-4, atol=1e-5),
    torch.float16: Tolerance(rtol=1e-2, atol=1e-2),
    torch.bfloat16: Tolerance(rtol=2e-2, atol=2e-2),
}
_LOOSEST = Tolerance(rtol=2e-2, atol=2e-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What the comparison of one graph found."""

    is_equal: bool
    max_abs_diff: float
    """Over the valid rows of all floating-point outputs; infinity when one is NaN on one side only."""
    rows: int
    """Valid rows compared in the last round."""
    detail: str = ""
    """Which output differed, and how."""


class SelfCheck:
    """Compares each captured graph with an eager run of its region on the same inputs.

    Eager runs with clean padding, the replay with poisoned padding: rows of the padding that leak into valid rows show
    as a difference. The region's `draw` makes the inputs; state is put back afterwards, generators too.
    """

    def __init__(self, *, num_rounds: int = 1, seed: int = 0, tolerance: Tolerance | None = None) -> None:
        if num_rounds < 1:
            raise ValueError(f"num_rounds must be at least 1, got {num_rounds}")
        self._num_rounds = num_rounds
        self._seed = seed
        self._tolerance = tolerance

    def check(self, graph: CapturedGraph) -> CheckResult:
        """Run the comparison. Waits for the device; leaves the static inputs filled with test values."""
        result = CheckResult(is_equal=True, max_abs_diff=0.0, rows=0)
        for number in range(self._num_rounds):
            result = self._round(graph, self._seed + number, result.max_abs_diff)
            if not result.is_equal:
                break
        return result

    def _round(self, graph: CapturedGraph, seed: int, worst: float) -> CheckResult:
        region = graph.region
        states = [generator.get_state() for generator in region.generators]
        rows = _draw(region, seed, poison=False)
        with region.undone():
            expected = pytree.tree_map_only(Tensor, lambda output: output.detach().clone(), region.run())
        _restore(region, states)
        _draw(region, seed, poison=True)
        with region.undone():
            actual = graph.replay().clone()
        _restore(region, states)
        result = compare(expected, actual, rows=rows, bucket=graph.key.bucket, tolerance=self._tolerance)
        return replace(result, max_abs_diff=max(worst, result.max_abs_diff))


def compare(
    expected: Any, actual: Any, *, rows: int, bucket: int | None = None, tolerance: Tolerance | None = None
) -> CheckResult:
    """Compare two trees of tensors; of tensors with `bucket` rows only the first `rows`. NaN equals NaN.

    `tolerance` applies to all floating-point types; None = that of each type.
    """
    worst = 0.0
    for path, wanted, given in _paired(expected, actual):
        if wanted.dim() and wanted.shape[0] == bucket:
            wanted, given = wanted[:rows], given[:rows]
        worst = max(worst, difference := _max_abs_diff(wanted, given))
        if not _is_close(wanted, given, tolerance):
            detail = f"output {path} differs from eager by up to {difference:.3g}"
            return CheckResult(is_equal=False, max_abs_diff=worst, rows=rows, detail=detail)
    return CheckResult(is_equal=True, max_abs_diff=worst, rows=rows)


def _is_close(wanted: Tensor, given: Tensor, tolerance: Tolerance | None) -> bool:
    if wanted.shape != given.shape:
        return False
    if not wanted.is_floating_point():
        return torch.equal(wanted, given)
    limit = tolerance or TOLERANCES.get(wanted.dtype, _LOOSEST)
    return torch.allclose(given.double(), wanted.double(), rtol=limit.rtol, atol=limit.atol, equal_nan=True)


def _draw(region: CaptureRegion, seed: int, *, poison: bool) -> int:
    generator = torch.Generator().manual_seed(seed)
    if region.draw is not None:
        return region.draw(generator, poison)
    for tensor in region.inputs.values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return max((tensor.shape[0] for tensor in region.inputs.values() if tensor.dim()), default=0)


def _restore(region: CaptureRegion, states: list[Tensor]) -> None:
    for generator, state in zip(region.generators, states, strict=True):
        generator.set_state(state)


def _paired(expected: Any, actual: Any) -> list[tuple[str, Tensor, Tensor]]:
    wanted, _ = pytree.tree_flatten_with_path(expected)
    given = pytree.tree_leaves(actual)
    return [
        (pytree.keystr(path) or "0", leaf, other)
        for (path, leaf), other in zip(wanted, given, strict=True)
        if isinstance(leaf, Tensor)
    ]


def _max_abs_diff(wanted: Tensor, given: Tensor) -> float:
    """Largest difference; a NaN on one side only counts as infinity, on both sides as none."""
    if wanted.shape != given.shape:
        return float("inf")
    if wanted.numel() == 0:
        return 0.0
    same = (wanted == given) | (wanted.isnan() & given.isnan()) if wanted.is_floating_point() else wanted == given
    difference = (wanted.double() - given.double()).abs().masked_fill(same, 0.0)
    return float(difference.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
