"""Replays captured graphs; what has no graph, or not yet, is launched kernel by kernel."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from worker.batch import Batch
from worker.block_pool import PADDING_BLOCK, BlockPool
from worker.causal_lm import NativeCausalLM
from worker.graph_draws import CHECKED_ROWS, HISTORY_BLOCKS
from worker.graph_memory import StepMemory
from worker.graph_regions import ANY, CHUNK, DRAW, FRESH, PACKED, GraphRegions
from worker.graphs.backend import CaptureBackend
from worker.graphs.captured import CapturedGraph
from worker.graphs.dispatcher import Dispatcher, Miss
from worker.graphs.key import GraphKey
from worker.graphs.plan import plan_captures
from worker.graphs.pool import GraphPool
from worker.graphs.recorder import WARMUP_STEPS
from worker.graphs.self_check import SelfCheck
from worker.graphs.session import CaptureSession, SessionOptions
from worker.inputs import MAX_PACKED
from worker.kernel_builds import KernelBuilds
from worker.kernels.build_ahead import can_build_ahead
from worker.kernels.build_processes import BuildProcesses
from worker.kv_cache import KVCache
from worker.load import GraphReadiness, GraphSnapshot, GraphUse
from worker.pending import DoneStep, PendingStep
from worker.runner import EagerRunner
from worker.sampler import Sampled
from worker.sampling_needs import DRAW_NEEDS, SampledRow, needs_of_all
from worker.step_kernels import Outputs, TorchKernels
from worker.step_output import StepOutput
from worker.tiers import BucketTable, TierTable

log = logging.getLogger(__name__)

OWN_WARMUP_STEPS = 1
"""Of models whose every launch is ours: nothing in them tunes itself or compiles by and by."""
MIN_PACKED = 64
"""Tokens of the smallest bucket for several prompts; fewer are padded to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """How a worker's graphs are captured."""

    use_pool: bool = True
    """One pool of graph memory for all keys; off = a private pool for each graph."""
    max_bytes: int | None = None
    """Cap on the memory of all graphs; keys that would go over it run eagerly."""
    two_pass: bool = True
    """Warm every shape before the first capture."""
    self_check: bool = True
    """Compare every captured key with eager before it serves."""


class GraphRunner:
    """See worker.runner.Runner. One prefill step serves a part of one prompt, or several whole ones.

    Owns some blocks of the KV pool, in which self-checks keep their history.
    """

    packs_parts = False
    max_ahead = 1

    def __init__(
        self,
        eager: EagerRunner,
        pool: BlockPool,
        buckets: BucketTable,
        prefill_buckets: BucketTable,
        backend: CaptureBackend,
        *,
        options: GraphOptions | None = None,
    ) -> None:
        options = options or GraphOptions()
        self.eager = eager
        self.kv_cache: KVCache = eager.kv_cache
        self.dispatcher = Dispatcher()
        scratch = pool.reserve(num_scratch_blocks(buckets, prefill_buckets, self.kv_cache.block_size))
        self.regions = GraphRegions(
            eager.model,
            self.kv_cache,
            eager.kernels,
            eager.tiers,
            decode_inputs=eager.decode_inputs,
            prefill_inputs=eager.prefill_inputs,
            sampling=eager.sampling,
            scratch_blocks=scratch,
        )
        self.graph_pool = GraphPool(backend, use_pool=options.use_pool, max_bytes=options.max_bytes)
        memory = StepMemory(
            eager.model.shape,
            self.kv_cache.storage.dtype,
            self.kv_cache.block_size,
            fused=not isinstance(eager.kernels, TorchKernels),
        )
        self.max_prefill_segments = MAX_PACKED if eager.kernels.can_pack else 1
        keys = worker_keys(eager.tiers, buckets, prefill_buckets, can_pack=eager.kernels.can_pack)
        self.session = CaptureSession(
            plan_captures(keys, size_of=memory.graph_bytes),
            self.regions,
            pool=self.graph_pool,
            dispatcher=self.dispatcher,
            options=SessionOptions(
                two_pass=options.two_pass,
                num_warmup_steps=OWN_WARMUP_STEPS if isinstance(eager.model, NativeCausalLM) else WARMUP_STEPS,
            ),
            self_check=SelfCheck() if options.self_check else None,
            size_of=memory.graph_bytes,
        )
        self._builds: KernelBuilds | None = None
        self._steps: dict[GraphKey, Callable[[], Outputs]] = {}
        """Of keys that were asked for before they were captured."""

    @property
    def readiness(self) -> GraphReadiness:
        """See Runner."""
        return self.session.readiness

    def graph_snapshot(self) -> GraphSnapshot:
        """See Runner."""
        dispatcher = self.dispatcher
        replays = {**dict.fromkeys(self.session.graphs, 0), **dispatcher.replays}
        return GraphSnapshot(
            uses=tuple(GraphUse(key.phase, key.tier, key.bucket, key.variant, n) for key, n in replays.items()),
            misses=tuple((reason.name.lower(), count) for reason, count in dispatcher.misses.items()),
            padding_rows=sum(dispatcher.padding_rows.values()),
            quarantined=len(dispatcher.quarantined),
            dropped=len(dispatcher.dropped),
            pool_bytes=self.graph_pool.used_bytes,
            capture_s=self.session.seconds,
        )

    @property
    def num_to_prepare(self) -> int:
        """See Runner: kernels, warm-ups and captures."""
        return self.session.num_left + (self._builds.num_left if self._builds else 0)

    def prepare_next(self) -> bool:
        """Build some kernels, warm up or capture one key. The static inputs and the padding block are left inert."""
        if self._builds is not None and self._is_building(self._builds):
            return True
        self._make_inert()
        progress = self.session.capture_next()
        if progress is None:
            return False
        self._make_inert()
        log.info("%s %s %s", progress.key, progress.stage.value, progress.detail)
        return True

    def prepare_all(self) -> None:
        """Capture every key now, before serving."""
        while self.prepare_next():
            pass

    def build_kernels(self, processes: BuildProcesses | None = None) -> int:
        """Build the kernels that a first request launches, before anything runs; returns how many. 0 where that cannot be.

        Those of all other keys are then asked for in pieces by `prepare_next`, before the first capture. `processes`, if
        there are any, are then this runner's to close.
        """
        if self.kv_cache.storage.device.type != "cuda" or not can_build_ahead():
            if processes is not None:
                processes.close()
            return 0
        self._builds = KernelBuilds(self.regions, self.session.waiting, processes)
        return self._builds.build_first()

    def _is_building(self, builds: KernelBuilds) -> bool:
        """Whether this turn went into kernels, asked for or waited for."""
        num_asked = builds.build_next()
        if num_asked is not None:
            log.info("%d more kernels are being built", num_asked)
            return True
        key = self.session.next_key
        if key is None:
            self._builds = None  # and with it the threads that built
            return False
        return not builds.are_built(key)

    def can_overlap(self, batch: Batch) -> bool:
        """See Runner."""
        return self.eager.can_overlap(batch)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """See Runner."""
        found = self._find(batch)
        key = found.pending if isinstance(found, Miss) else found
        if key is None:
            return self.eager.launch(batch)
        has_graph = key is found
        runner = "graph" if has_graph else "eager"
        inputs = self.eager.decode_inputs if batch.phase == "decode" else self.eager.prefill_inputs
        inputs.fill(batch, key.bucket)
        with self._outputs_of(key, has_graph=has_graph) as (_, packed):
            letter = self.eager.open_letter(batch, packed)
        if letter is None:
            return DoneStep(StepOutput([], [], [], runner))
        rows = self.eager.sampling.rows_of(batch)
        if rows:
            letter.overlay(rows, self._sample(rows))
        return letter.send(runner)

    def _outputs_of(self, key: GraphKey, *, has_graph: bool) -> contextlib.AbstractContextManager[Outputs]:
        """Of one step of `key`, which launches one by one what its graph will hold as long as it has none.

        So a step of its own shape needs no kernel that the graph does not need, too.
        """
        if has_graph:
            return self.session.graphs[key].replay()
        if key not in self._steps:
            self._steps[key] = self.regions(key).run
        return contextlib.nullcontext(self._steps[key]())

    def _sample(self, rows: tuple[SampledRow, ...]) -> Sampled:
        """The tokens of `rows`, from the logits that the graph of the step has left."""
        for variant in (ANY,) if needs_of_all(rows) & ~DRAW_NEEDS else (DRAW, ANY):
            if not isinstance(self.dispatcher.find("sample", 0, len(rows), variant), Miss):
                found = self.dispatcher.dispatch("sample", 0, len(rows), variant)
                assert isinstance(found, GraphKey)
                self.eager.sampling.table.fill(rows, found.bucket)
                return self.session.graphs[found].replay().outputs  # type: ignore[no-any-return]
        # No miss: those are counted by steps, and this one may have had a graph.
        return self.eager.sampling(self.regions.logits, rows)

    def _make_inert(self) -> None:
        """Warm-up and capture run over the static inputs: what the last step left in them must not be written again."""
        self.eager.decode_inputs.make_inert()
        self.eager.prefill_inputs.make_inert()
        self.eager.sampling.table.make_inert()
        self.kv_cache.scrub([PADDING_BLOCK])

    def _find(self, batch: Batch) -> GraphKey | Miss:
        if batch.phase == "decode":
            return self.dispatcher.dispatch("decode", batch.tier, len(batch.segments))
        if len(batch.segments) > 1:
            return self.dispatcher.dispatch("prefill", 0, batch.num_tokens, PACKED)
        is_fresh = batch.segments[0].start == 0
        tier, variant = (0, FRESH) if is_fresh else (batch.tier, CHUNK)
        return self.dispatcher.dispatch("prefill", tier, batch.num_tokens, variant)

    @property
    def graphs(self) -> Collection[CapturedGraph]:
        """The captured graphs."""
        return self.session.graphs.values()


def worker_keys(
    tiers: TierTable, buckets: BucketTable, prefill_buckets: BucketTable, *, can_pack: bool = True
) -> list[GraphKey]:
    """Every shape worth a graph: decode in each tier and bucket; prompts from the start, alone and several; later parts;
    sampling.

    A later part follows a cached block or a chunk, so in each tier it is at most a block shorter than the tier. Very
    small prefill buckets are left to larger ones, and every other one of sampling, where padding costs next to nothing.
    """
    decode = [GraphKey("decode", tier, bucket) for tier in tiers.lengths for bucket in buckets.sizes]
    sizes = [size for size in prefill_buckets.sizes if size >= min(16, prefill_buckets.largest)]
    fresh = [GraphKey("prefill", 0, size, FRESH) for size in sizes if size <= tiers.longest]
    packed = [
        GraphKey("prefill", 0, size, PACKED) for size in sizes if size >= min(MIN_PACKED, prefill_buckets.largest)
    ]
    later = [
        GraphKey("prefill", tier, size, CHUNK)
        for tier in tiers.lengths
        for size, smaller in zip(sizes, [0, *sizes], strict=False)
        if smaller < tier - tiers.block_size
    ]
    sample = [
        GraphKey("sample", 0, size, variant)
        for place, size in enumerate(buckets.sizes)
        for variant in (DRAW, ANY)
        if place % 2 == 0 or size == buckets.largest
    ]
    return decode + fresh + (packed if can_pack else []) + later + sample


def num_scratch_blocks(buckets: BucketTable, prefill_buckets: BucketTable, block_size: int) -> int:
    """Blocks for the tokens of the largest chunk, or for some decode rows of their own, and for their history."""
    written = max(-(-prefill_buckets.largest // block_size), min(buckets.largest, CHECKED_ROWS))
    return written + HISTORY_BLOCKS
