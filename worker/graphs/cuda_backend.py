"""Records regions with torch.cuda.CUDAGraph: one capture stream, shared pools, no device-wide waits."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from worker.graphs.backend import MemoryReading, PoolHandle
from worker.graphs.capture_recovery import end_capture, give_back
from worker.graphs.region import storage_of
from worker.graphs.traps import check_driver

CaptureErrorMode = Literal["global", "thread_local", "relaxed"]


class CudaCapture:
    """Captures on one stream of its own. One instance per worker, used by one thread.

    `error_mode` thread_local lets other threads copy and allocate meanwhile. `keep_graph` keeps the graph's description,
    which counts its nodes and costs host memory.
    """

    def __init__(
        self,
        device: torch.device | str = "cuda",
        *,
        error_mode: CaptureErrorMode = "thread_local",
        keep_graph: bool = False,
    ) -> None:
        check_driver(driver_version(), torch.version.cuda)
        self.device = torch.device("cuda", torch.device(device).index or 0)
        self.stream = torch.cuda.Stream(self.device)
        self._error_mode: CaptureErrorMode = error_mode
        self._keep_graph = keep_graph

    def new_pool(self) -> PoolHandle:
        """A handle that graphs of this worker share; memory comes with the first capture."""
        return torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], Any], num_steps: int) -> None:
        """Run on the capture stream, after the current stream's work and before what it launches next.

        Both directions matter: captured kernels use the capture stream's library workspaces, so a warm-up must not run
        beside a replay.
        """
        with self._on_capture_stream():
            for _ in range(num_steps):
                run()

    def capture(
        self,
        run: Callable[[], Any],
        *,
        pool: PoolHandle,
        generators: Sequence[torch.Generator] = (),
        outside: Collection[int] = (),
        keep_outputs: bool = False,
    ) -> CudaGraph:
        """Record the region. See `CaptureBackend.capture`."""
        graph = torch.cuda.CUDAGraph(keep_graph=self._keep_graph)
        for generator in generators:
            graph.register_generator_state(generator)
        _drop_library_workspaces()
        with self._on_capture_stream():
            outputs, seconds = self._record(graph, run, pool)
        if not keep_outputs:
            outputs = pytree.tree_map_only(Tensor, lambda output: self._unowned(output, outside), outputs)
        return CudaGraph(graph, outputs, seconds, _count_nodes(graph) if self._keep_graph else None)

    def is_usable(self, pool: PoolHandle, generators: Sequence[torch.Generator] = ()) -> bool:
        """Try: capture one operation into the pool, or a new one; either takes the generators out of a broken capture."""
        if self._can_capture(pool, generators):
            return True
        self._can_capture(self.new_pool(), generators)
        return False

    def memory(self) -> MemoryReading:
        """As the driver and torch's allocator report it."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return MemoryReading(free_bytes=free, reserved_bytes=torch.cuda.memory_reserved(self.device))

    def trim(self) -> None:
        """Return cached blocks to the driver; waits for the device."""
        _drop_library_workspaces()
        torch.cuda.empty_cache()

    def current_stream(self) -> Hashable:
        """The current stream of this device."""
        return torch.cuda.current_stream(self.device)

    def wait_for(self, stream: Hashable) -> None:
        """Order the current stream after `stream`, with an event."""
        assert isinstance(stream, torch.cuda.Stream)
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def _can_capture(self, pool: PoolHandle, generators: Sequence[torch.Generator]) -> bool:
        try:
            probe = torch.zeros(1, device=self.device)
            self.capture(lambda: probe + 1, pool=pool, generators=generators).reset()
        except RuntimeError:
            return False
        return True

    @contextlib.contextmanager
    def _on_capture_stream(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream(self.device)
            self.stream.wait_stream(current)
            try:
                with torch.cuda.stream(self.stream):
                    yield
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    current.wait_stream(self.stream)
                raise
            current.wait_stream(self.stream)

    def _record(self, graph: torch.cuda.CUDAGraph, run: Callable[[], Any], pool: PoolHandle) -> tuple[Any, float]:
        """What the region returned, and the seconds from its end to an executable graph."""
        try:
            graph.capture_begin(pool=pool, capture_error_mode=self._error_mode)
        except BaseException:
            give_back(graph, pool, self.stream.device_index)
            raise
        try:
            outputs = run()
            started = time.perf_counter()
            graph.capture_end()
            if self._keep_graph:
                graph.instantiate()
        except BaseException:
            end_capture(graph, pool, self.stream)
            raise
        return outputs, time.perf_counter() - started

    def _unowned(self, output: Tensor, outside: Collection[int]) -> Tensor:
        """The same memory without a claim on it, so that later graphs of the pool may use it too."""
        if not output.is_cuda or storage_of(output) in outside:
            return output
        return alias_without_owning(output)


class CudaGraph:
    """One recorded CUDA graph and its outputs."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Any, instantiate_s: float, num_nodes: int | None) -> None:
        self.graph = graph
        self.outputs = outputs
        self.instantiate_s = instantiate_s
        self.num_nodes = num_nodes

    def replay(self) -> None:
        """Launch on the current stream."""
        self.graph.replay()

    def reset(self) -> None:
        """Destroy the executable and leave the pool."""
        self.outputs = None
        self.graph.reset()


class _DeviceMemory:
    """A stretch of device memory, described the way array libraries exchange it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def alias_without_owning(tensor: Tensor) -> Tensor:
    """A tensor over the same memory that does not keep it allocated; valid only as long as someone else does."""
    tensor = tensor.detach()
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return tensor
    memory = torch.as_tensor(_DeviceMemory(storage.data_ptr(), storage.nbytes()), device=tensor.device)
    assert memory.data_ptr() == storage.data_ptr()
    whole = memory[: storage.nbytes() // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _drop_library_workspaces() -> None:
    """Have cuBLAS allocate its workspaces anew: in the pool, if a capture is next.

    Newer torch frees the capture stream's workspaces with every graph that is reset. A workspace of warm-up would then
    become someone else's memory, under the graphs that remain; one in the pool stays theirs.
    """
    torch._C._cuda_clearCublasWorkspaces()


def driver_version() -> int | None:
    """CUDA version of the driver, as 1000 * major + 10 * minor; None when there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int | None:
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    status, _, count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph())
    return int(count) if int(status) == 0 else None
