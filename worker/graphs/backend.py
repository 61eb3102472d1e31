"""What records and replays graphs: CUDA itself, or its emulation on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

PoolHandle = Any
"""An opaque name of graph memory that several graphs may share."""


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Device memory at one moment, in bytes."""

    free_bytes: int
    """Free on the device, for anyone."""
    reserved_bytes: int
    """Held by torch's allocator in this process, graph pools included."""


class RecordedGraph(Protocol):
    """One recorded graph. Not thread-safe."""

    outputs: Any
    """What the region returned; meaningless until the first replay."""
    instantiate_s: float
    """Seconds from the last recorded operation to an executable graph."""
    num_nodes: int | None
    """Operations in the graph, where known."""

    def replay(self) -> None:
        """Launch the graph on the current stream."""

    def reset(self) -> None:
        """Give up the graph and its claim on its memory."""


class CaptureBackend(Protocol):
    """Warms regions up and records them, always on the same one capture stream."""

    device: torch.device

    def new_pool(self) -> PoolHandle:
        """A new, empty pool of graph memory."""

    def warm_up(self, run: Callable[[], Any], num_steps: int) -> None:
        """Run the region on the capture stream, ordered after and before the current stream's work."""

    def capture(
        self,
        run: Callable[[], Any],
        *,
        pool: PoolHandle,
        generators: Sequence[torch.Generator] = (),
        outside: Collection[int] = (),
        keep_outputs: bool = False,
    ) -> RecordedGraph:
        """Record the region into `pool`.

        Outputs whose storage is in `outside` (declared buffers) stay references. Others are memory of the pool: with
        `keep_outputs` no later graph of the pool is given that memory, otherwise any of them may be. Raises whatever
        the region, torch or CUDA raises; after that nothing is capturing and the pool can still be used, unless
        `is_usable` says otherwise.
        """

    def is_usable(self, pool: PoolHandle, generators: Sequence[torch.Generator] = ()) -> bool:
        """Whether another graph can be captured into the pool, after one that used `generators` has failed."""

    def memory(self) -> MemoryReading:
        """Free and reserved memory now."""

    def trim(self) -> None:
        """Return cached, unused memory to the device. Slow: never on a step path."""

    def current_stream(self) -> Hashable:
        """The stream that the current thread launches on; None where there are no streams."""

    def wait_for(self, stream: Hashable) -> None:
        """Order the current stream after all work that is on `stream` now."""


def backend_for(device: torch.device | str) -> CaptureBackend:
    """The real backend for a CUDA device, the emulation for any other."""
    device = torch.device(device)
    if device.type == "cuda":
        from worker.graphs.cuda_backend import CudaCapture

        return CudaCapture(device)
    from worker.graphs.fake_backend import FakeCapture

    return FakeCapture(device)
