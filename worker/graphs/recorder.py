"""Turns regions into captured graphs: warm-up, checks, capture, diagnosis."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from worker.graphs.captured import CapturedGraph
from worker.graphs.compile_watch import CompileWatch
from worker.graphs.errors import FirstUseInRegion, MissingWarmUp
from worker.graphs.key import GraphKey
from worker.graphs.pool import GraphPool
from worker.graphs.precheck import Precheck, precheck_region
from worker.graphs.region import CaptureRegion, storage_of
from worker.graphs.traps import Stage, diagnose

MIN_WARMUP_STEPS = 1
"""What is launched for the first time may load a library or a kernel, which a capture does not allow."""
WARMUP_STEPS = 3
"""For regions of any kind: a compiler may still change its mind after the first."""
_EXTRA_STEPS = 5
"""Further steps granted to compilers that have not settled."""

Result = TypeVar("Result")


class GraphRecorder:
    """Warms up and captures one region at a time into a pool. Used by one thread.

    The first warm-up step of a region is a pre-check: it finds, with operator and source line, what would stop or spoil
    the capture, and collects every tensor that the graph will read so that it can be kept alive.
    """

    def __init__(self, pool: GraphPool) -> None:
        self.pool = pool
        self._warmed: set[GraphKey] = set()
        self._reads: dict[GraphKey, tuple[Tensor, ...]] = {}

    def warm_up(
        self, key: GraphKey, region: CaptureRegion, *, num_steps: int = WARMUP_STEPS, check: bool = True
    ) -> Precheck | None:
        """Run the region `num_steps` times on the capture stream, and on until a step compiles nothing.

        `check` makes the first step a pre-check and raises its first finding. The region's state is put back at the end.
        """
        if num_steps < MIN_WARMUP_STEPS:
            raise ValueError(f"num_steps must be at least {MIN_WARMUP_STEPS}, got {num_steps}")
        report = None
        with region.undone():
            if check:
                report = self._diagnosed(lambda: self._precheck(key, region), "warm-up", key)
            steps = num_steps - int(check)
            self._diagnosed(lambda: self._warm(key, region, steps), "warm-up", key)
        self._warmed.add(key)
        return report

    def capture(self, key: GraphKey, region: CaptureRegion, *, keep_outputs: bool = False) -> CapturedGraph:
        """Record the region and return its graph, whose outputs mean nothing before the first replay.

        Raises MissingWarmUp for a key that was not warmed up, CaptureOutOfMemory, or the CaptureError that explains why
        CUDA refused; an exception that has nothing to do with graphs passes through.
        """
        if key not in self._warmed:
            raise MissingWarmUp("was never warmed up", key=str(key))
        outside = {storage_of(tensor) for _, tensor in region.named_tensors()}
        with CompileWatch() as compiling:
            pooled = self._diagnosed(
                lambda: self.pool.capture(
                    key, region.run, generators=region.generators, outside=outside, keep_outputs=keep_outputs
                ),
                "capture",
                key,
            )
        if compiling.builds:
            self.pool.release(key)
            raise FirstUseInRegion(f"{compiling.builds} kernel(s) were compiled during capture", key=str(key))
        return CapturedGraph(
            key,
            region,
            pooled.recorded,
            pooled.epoch,
            cost=pooled.cost,
            kept_alive=self._reads.get(key, ()),
            keeps_outputs=keep_outputs,
        )

    def release(self, graph: CapturedGraph) -> None:
        """Destroy a graph and take it out of the pool."""
        self.pool.release(graph.key)
        graph.release()

    def forget(self, key: GraphKey) -> None:
        """A later capture of this key must be warmed up again."""
        self._warmed.discard(key)
        self._reads.pop(key, None)

    def _precheck(self, key: GraphKey, region: CaptureRegion) -> Precheck:
        reports: list[Precheck] = []
        self.pool.backend.warm_up(lambda: reports.append(precheck_region(region, str(key))), 1)
        reports[0].raise_first()
        self._reads[key] = reports[0].reads
        return reports[0]

    def _warm(self, key: GraphKey, region: CaptureRegion, num_steps: int) -> None:
        for step in range(num_steps + _EXTRA_STEPS):
            with CompileWatch() as compiling:
                self.pool.backend.warm_up(region.run, 1)
            if step + 1 >= num_steps and not compiling.builds:
                return
        raise FirstUseInRegion(f"still compiling after {num_steps + _EXTRA_STEPS} steps", key=str(key))

    def _diagnosed(self, action: Callable[[], Result], stage: Stage, key: GraphKey) -> Result:
        try:
            return action()
        except RuntimeError as error:
            explained = diagnose(error, stage=stage, key=str(key))
            if explained is None:
                raise
            raise explained from error
