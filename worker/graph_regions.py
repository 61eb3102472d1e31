"""The captured functions of a worker: decode, and prefill of one sequence, over static inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from worker.causal_lm import CausalLM, StepAttention
from worker.decode_inputs import DecodeInputs
from worker.decode_step import decode_step
from worker.graph_draws import DecodeDraw, PackedDraw, PrefillDraw
from worker.graphs.key import GraphKey
from worker.graphs.region import CaptureRegion, DrawInputs, module_tables
from worker.inputs import MAX_PACKED, PrefillInputs
from worker.kv_cache import KVCache
from worker.sample_draw import SampleDraw
from worker.sampler import Sampled
from worker.sampling_needs import ALL_NEEDS, DRAW_NEEDS, Need
from worker.sampling_stage import SamplingStage
from worker.step_kernels import Outputs, StepKernels
from worker.tiers import TierTable

FRESH = "fresh"
"""Prefill of a prompt from position 0, whole: no look at the pool."""
PACKED = "packed"
"""Prefill of several whole prompts side by side."""
CHUNK = "chunk"
"""Prefill of a later part of a prompt."""
DRAW = "draw"
"""Sampling of rows that need no more than DRAW_NEEDS: two launches."""
ANY = "any"
"""Sampling of rows of any kind."""


class GraphRegions:
    """Makes the region of a key. Everything it reads has a fixed address: inputs, weights, KV pool."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        kernels: StepKernels,
        tiers: TierTable,
        *,
        decode_inputs: DecodeInputs,
        prefill_inputs: PrefillInputs,
        sampling: SamplingStage,
        scratch_blocks: Sequence[int],
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.kernels = kernels
        self.tiers = tiers
        self.decode_inputs = decode_inputs
        self.prefill_inputs = prefill_inputs
        self.sampling = sampling
        rows, vocab = max(decode_inputs.max_batch, MAX_PACKED), model.shape.vocab_size
        self.logits = torch.empty(rows, vocab, dtype=torch.float32, device=kv_cache.storage.device)
        """Where every graph of a step leaves its logits, for the graph that samples."""
        self.scratch_blocks = scratch_blocks
        """Blocks that no sequence owns; self-checks read and write them."""

    def __call__(self, key: GraphKey) -> CaptureRegion:
        """The region of `key`."""
        if key.phase == "sample":
            return self._sample(key)
        return self._decode(key) if key.phase == "decode" else self._prefill(key)

    def go_through(self, key: GraphKey) -> object:
        """Launch what the region of `key` launches, where launches run nothing; see build_ahead."""
        if key.phase == "sample":
            return self.sampling.go_through(self.logits, key.bucket, _needs(key))
        return self(key).run()

    def _decode(self, key: GraphKey) -> CaptureRegion:
        views = self.decode_inputs.views(key.bucket, self.tiers.num_blocks(key.tier))
        views = replace(views, logits=self.logits[: key.bucket])

        @torch.inference_mode()
        def run() -> Outputs:
            return self._left(decode_step(self.model, self.kernels, views))

        inputs = {"token_ids": views.token_ids, "live": views.live, "block_tables": views.block_tables}
        moving = {"positions": views.positions, "sources": views.sources, "last_tokens": views.last_tokens}
        draw = DecodeDraw(self.decode_inputs, self.kv_cache, self.scratch_blocks, key, self.model.shape.vocab_size)
        return self._region(run, inputs, draw, state=moving, constants={"rows": views.rows})

    def _prefill(self, key: GraphKey) -> CaptureRegion:
        inputs = self._prefill_views(key)
        sampled = inputs["lasts" if key.variant == PACKED else "last"]

        @torch.inference_mode()
        def run() -> Outputs:
            attend = self._prefill_attention(key, inputs)
            logits = self.model.compute(inputs["token_ids"], inputs["positions"], attend, sampled)
            return self._left(self.kernels.greedy(logits))

        made = PackedDraw if key.variant == PACKED else PrefillDraw
        draw = made(self.prefill_inputs, self.kv_cache, self.scratch_blocks, key, self.model.shape.vocab_size)
        return self._region(run, inputs, draw)

    def _sample(self, key: GraphKey) -> CaptureRegion:
        self.sampling.prepare()
        table, needs = self.sampling.table, _needs(key)
        views = table.views(key.bucket)

        @torch.inference_mode()
        def run() -> Sampled:
            return self.sampling.record(self.logits, key.bucket, needs)

        tables = {name: getattr(views, name) for name in ("allowed", "banned", "bias_ids", "bias")}
        return CaptureRegion(
            run=run,
            inputs={"logits": self.logits, "places": views.places, "real": views.real, **tables},
            state={"whole": views.whole, "last_tokens": views.last_tokens},
            scratch={"counts": views.counts},
            draw=SampleDraw(table, self.logits, key, needs),
        )

    def _left(self, outputs: Outputs) -> Outputs:
        """The outputs, with the logits where the graph that samples finds them."""
        logits, packed = outputs
        place = self.logits[: len(logits)]
        if logits.data_ptr() != place.data_ptr():
            place.copy_(logits)
        return place, packed

    def _prefill_attention(self, key: GraphKey, inputs: Mapping[str, torch.Tensor]) -> StepAttention:
        if key.variant == FRESH:
            return self.kernels.fresh(slots=inputs["slots"])
        if key.variant == PACKED:
            return self.kernels.packed(slots=inputs["slots"], offsets=inputs["offsets"])
        return self.kernels.chunk(
            slots=inputs["slots"],
            positions=inputs["positions"],
            block_table=inputs["block_table"],
            context_len=inputs["context_len"],
        )

    def _prefill_views(self, key: GraphKey) -> dict[str, torch.Tensor]:
        device = self.prefill_inputs.staging.device
        tokens = {name: device[name][: key.bucket] for name in ("token_ids", "positions", "slots")}
        if key.variant == PACKED:
            return tokens | {name: device[name] for name in ("offsets", "lasts")}
        single = {"last": device["last"]}
        if key.variant == CHUNK:
            width = self.tiers.num_blocks(key.tier)
            single |= {"context_len": device["context_len"], "block_table": device["block_table"][:width]}
        return tokens | single

    def _region(
        self,
        run: Callable[[], Outputs],
        inputs: Mapping[str, torch.Tensor],
        draw: DrawInputs,
        *,
        state: Mapping[str, torch.Tensor] | None = None,
        constants: Mapping[str, torch.Tensor] | None = None,
    ) -> CaptureRegion:
        return CaptureRegion(
            run=run,
            inputs=inputs,
            constants=(*module_tables(self.model.module), ("", constants or {})),
            state=state or {},
            scratch={"kv": self.kv_cache.storage, "logits": self.logits},
            draw=draw,
        )


def _needs(key: GraphKey) -> Need:
    return DRAW_NEEDS if key.variant == DRAW else ALL_NEEDS
