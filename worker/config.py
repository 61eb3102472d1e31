"""How one worker is set up."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from worker.field_values import check_types
from worker.tiers import BucketTable, TierTable

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Graphs = Literal["auto", "off", "fake"]
Capture = Literal["background", "startup"]
Kernels = Literal["auto", "torch", "triton"]
ModelImpl = Literal["auto", "native", "transformers"]

_CHOICES = {
    "load_format": LoadFormat,
    "device": Device,
    "dtype": Dtype,
    "graphs": Graphs,
    "capture": Capture,
    "kernels": Kernels,
    "model_impl": ModelImpl,
}
MAX_CPU_THREADS = 1024
"""OpenMP crashes when it cannot start as many threads as it was told to."""
_AT_MOST = {"cpu_threads": MAX_CPU_THREADS, "max_batch": 8192, "block_size": 1024, "prefill_chunk": 1 << 18}
"""Beyond any use; what is set aside for a step grows with them, and would not fit a machine's memory."""
_POSITIVE = (
    *("max_model_len", "max_batch", "block_size", "kv_cache_bytes", "prefill_chunk"),
    *("prefill_chunk_when_busy", "max_waiting", "cpu_threads", "max_graph_bytes"),
)
_MAX_NAME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Everything a worker can be told. `None` means: decided from the model and the device."""

    model: str = "smollm2-135m"
    """The embedded model's name, a local directory, a `.gguf` file, or a hub id."""
    served_model_name: str = ""
    """By which clients ask for the model and routers tell models apart; "" = `model`."""
    load_format: LoadFormat = "auto"
    """"dummy" reads a config alone and makes random weights; prompts are then token ids."""
    device: Device = "auto"
    """"auto" takes CUDA where there is a GPU."""
    dtype: Dtype = "auto"
    """"auto" is bfloat16 on CUDA and float32 on the CPU."""
    max_model_len: int | None = None
    """Longest sequence, prompt and answer together, in tokens; None = the model's limit."""
    tiers: tuple[int, ...] | None = None
    """Four sequence lengths, ascending; the last must be `max_model_len`."""
    max_batch: int | None = None
    """Sequences decoded together at most; None = 256 on CUDA, 16 on the CPU."""
    buckets: tuple[int, ...] | None = None
    """Batch sizes that steps are padded to, ascending; must hold 1 and `max_batch`."""
    block_size: int = 16
    """Tokens in one block of the KV pool."""
    kv_cache_bytes: int | None = None
    """Size of the KV pool; None = what `gpu_memory_fraction` leaves on CUDA, 512 MiB or one longest sequence on the CPU."""
    gpu_memory_fraction: float = 0.85
    """Part of the GPU's memory that weights, KV pool and graphs may take."""
    prefill_chunk: int | None = None
    """Prompt tokens computed in one step at most; longer prompts are cut into chunks; None = 1024 on CUDA, 512 on the CPU."""
    prefill_chunk_when_busy: int | None = None
    """The same while other sequences wait for their next token: what a step may delay them by. Twice as much where eight
    prompts wait, four times where sixteen do, never over `prefill_chunk`. None = 256 on CUDA, 128 on the CPU, or
    `prefill_chunk` if that is less."""
    prefix_cache: bool = True
    """Keep the blocks of prompts and answers, and start new prompts behind the longest equal beginning."""
    mix_tenants: bool = True
    """Compute requests of different tenants (cache salts) in one batch. Off: one tenant's rows at a time, in the order in
    which requests came, so that nobody's time between tokens tells what another asks for; rows stay free between turns."""
    max_waiting: int = 1024
    """Sequences that may queue; more are refused."""
    graphs: Graphs = "auto"
    """"auto" captures CUDA graphs on CUDA; "off" runs eagerly; "fake" runs the graph path without a GPU."""
    capture: Capture = "background"
    """"background" serves eagerly at once and captures between steps; "startup" captures everything before serving."""
    use_graph_pool: bool = True
    """One pool of graph memory for all graphs; off = a private pool for each."""
    max_graph_bytes: int | None = None
    """Cap on the memory of all graphs; what would go over it runs eagerly."""
    kernels: Kernels = "auto"
    """"triton" runs attention and the native decoder's small operations as fused kernels, "torch" as torch's own; "auto"
    takes Triton on CUDA where it is installed."""
    model_impl: ModelImpl = "auto"
    """"native" is the built-in decoder, "transformers" the generic path; "auto" prefers native."""
    deterministic: bool = False
    """Bit-equal logits for equal sequences, whatever is computed beside them and on whichever worker of the same kind. Native
    decoder only; on the CPU in float32, on CUDA with Triton."""
    cpu_threads: int | None = None
    """Threads of one CPU operation; None = torch's choice."""
    weight_check_interval_s: float = 60.0
    """How often all weights are compared with what was loaded, between steps; the worker ends if a bit has changed. Up to
    a thousandth of the time while there is work, so that a pass of a busy worker may take longer; 0 = never."""
    seed: int = 0
    """Of the random weights of `load_format="dummy"`."""
    cache_dir: Path | None = None
    """Where converted models are kept; None = the user's cache folder."""

    def __post_init__(self) -> None:
        check_types(WorkerConfig, {entry.name: getattr(self, entry.name) for entry in fields(self)})
        if not self.model:
            raise ValueError(f"model is {self.model!r}, must name one")
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}, must be one of {', '.join(get_args(kind))}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        for name, limit in _AT_MOST.items():
            value = getattr(self, name)
            if value is not None and value > limit:
                raise ValueError(f"{name} is {value}, must be at most {limit}")
        if not 0 < self.gpu_memory_fraction <= 1:
            raise ValueError(f"gpu_memory_fraction is {self.gpu_memory_fraction}, must be in (0, 1]")
        if not 0 <= self.weight_check_interval_s < math.inf:
            raise ValueError(f"weight_check_interval_s is {self.weight_check_interval_s}, must be 0 or more seconds")
        if self.deterministic and self.model_impl == "transformers":
            raise ValueError("deterministic is true, and model_impl is 'transformers': only the native decoder can be")
        self._check_shapes()
        self._check_chunks()

        if not self.served_model_name.isprintable() or len(self.served_model_name) > _MAX_NAME:
            raise ValueError(
                f"served_model_name is {self.served_model_name!r}, must be at most {_MAX_NAME} printable characters"
            )

    @property
    def name(self) -> str:
        """What the model is called on the wire."""
        return self.served_model_name or self.model

    def _check_shapes(self) -> None:
        """What needs no model to be seen wrong."""
        if self.tiers is not None:
            longest = TierTable(self.tiers, self.block_size).longest
            if self.max_model_len is not None and longest != self.max_model_len:
                raise ValueError(f"the last of tiers is {longest}, must be max_model_len, {self.max_model_len}")
        if self.buckets is not None:
            largest = BucketTable(self.buckets).largest
            if self.max_batch is not None and largest != self.max_batch:
                raise ValueError(f"the last of buckets is {largest}, must be max_batch, {self.max_batch}")

    def _check_chunks(self) -> None:
        for name in ("prefill_chunk", "prefill_chunk_when_busy"):
            value = getattr(self, name)
            if value is not None and value % self.block_size:
                raise ValueError(f"{name} is {value}, must be a multiple of block_size, {self.block_size}")
        chunk, busy = self.prefill_chunk, self.prefill_chunk_when_busy
        if chunk is not None and busy is not None and busy > chunk:
            raise ValueError(f"prefill_chunk_when_busy is {busy}, must be at most prefill_chunk, {chunk}")
