"""A runner without a model, for testing what the engine does around one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.batch import Batch
from worker.block_pool import BlockPool
from worker.engine import Engine, EngineParts
from worker.kv_cache import KVCache
from worker.load import EngineInfo, GraphReadiness, GraphSnapshot
from worker.prefix_cache import PrefixCache
from worker.scheduler import Scheduler
from worker.sequence import Sequence
from worker.step_output import StepOutput
from worker.tiers import BucketTable, TierTable, default_buckets, default_tiers

VOCAB = 256
EOS = 0

NextToken = Callable[[Sequence], int]


def byte_text(ids: object, skip_special: bool) -> str:
    """A tokenizer of single bytes: token id = byte; 0 is a special token without text."""
    values = [int(i) for i in ids if not (skip_special and int(i) == EOS)]  # type: ignore[attr-defined]
    return bytes(values).decode("utf-8", errors="replace")


class ScriptRunner:
    """Chooses `next_token(sequence)`; knobs make a step fail or a row come out as NaN."""

    max_prefill_segments = 64
    packs_parts = True

    def __init__(self, next_token: NextToken, max_ahead: int = 0) -> None:
        self.next_token = next_token
        self.max_ahead = max_ahead
        self.batches: list[Batch] = []
        self.bad_rows: set[str] = set()
        self.error: Exception | None = None

    @property
    def readiness(self) -> GraphReadiness:
        return GraphReadiness.EAGER

    def graph_snapshot(self) -> GraphSnapshot:
        return GraphSnapshot()

    @property
    def num_to_prepare(self) -> int:
        return 0

    def prepare_next(self) -> bool:
        return False

    def can_overlap(self, batch: Batch) -> bool:
        return True

    def launch(self, batch: Batch) -> ScriptStep:
        if self.error is not None:
            raise self.error
        self.batches.append(batch)
        return ScriptStep(self, batch)


class ScriptStep:
    """Chooses its tokens when they are read, as a device that runs behind would have by then."""

    def __init__(self, runner: ScriptRunner, batch: Batch) -> None:
        self.runner = runner
        self.batch = batch

    def result(self) -> StepOutput:
        sequences = [segment.sequence for segment in self.batch.sampling]
        return StepOutput(
            [self.runner.next_token(sequence) for sequence in sequences],
            [sequence.request.request_id not in self.runner.bad_rows for sequence in sequences],
            [None] * len(sequences),
        )


class ManualClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def script_engine(
    next_token: NextToken,
    *,
    max_model_len: int = 64,
    max_batch: int = 8,
    num_blocks: int = 129,
    max_waiting: int = 100,
    clock: Callable[[], float] | None = None,
    max_ahead: int = 0,
    prefix_cache: bool = False,
    hold_s: Callable[[int], float] = lambda num_live: 0.0,
) -> tuple[Engine, ScriptRunner]:
    """An engine over a ScriptRunner and a byte tokenizer; the KV pool is real but one number wide."""
    runner = ScriptRunner(next_token, max_ahead)
    tiers = TierTable(default_tiers(max_model_len), 4)
    buckets = BucketTable(default_buckets(max_batch))
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(
        tiers=tiers,
        buckets=buckets,
        prefill_buckets=BucketTable(default_buckets(32)),
        pool=pool,
        max_waiting=max_waiting,
        max_prefill_segments=runner.max_prefill_segments,
        prefix_cache=PrefixCache(pool, 4) if prefix_cache else None,
    )
    info = EngineInfo(
        model="script",
        architecture="Script",
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        tiers=tiers.lengths,
        buckets=buckets.sizes,
        dtype="float32",
        device="cpu",
        has_tokenizer=True,
        has_chat_template=False,
    )
    kv_cache = KVCache(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=4,
        num_kv_heads=1,
        head_dim=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    parts = EngineParts(
        info=info,
        scheduler=scheduler,
        runner=runner,
        kv_cache=kv_cache,
        decode=byte_text,
        clock=clock or ManualClock(),
        hold_s=hold_s,
    )
    return Engine(parts), runner
