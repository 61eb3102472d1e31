"""What a benchmark of a pool under Serve runs, by model and device."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.shapes import SHAPES, TINY, write_config
from worker.config import WorkerConfig

EMBEDDED = "embedded"
NUM_QUESTIONS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run."""

    model: str
    """As results name it."""
    fast: WorkerConfig
    """Of the starts that are timed."""
    deterministic: WorkerConfig
    """Of everything else."""
    gpus: int
    device: str
    prompt_tokens: int = 64
    answer_tokens: int = 64
    num_questions: int = NUM_QUESTIONS
    share: float = 0.45
    """Of a GPU, for each of two replicas on one."""
    rate_per_s: float = 40.0
    """Of the steady load, for both."""
    low_per_s: float = 8.0
    high_per_s: float = 80.0
    """Before and after the step of load that scaling is to follow."""
    occupancy: float = 0.1
    """Part of the rows that scaling is to use."""
    calm_s: float = 4.0
    """Of steady load before and after something happens."""
    limit_s: float
    slowness: float = 1.0
    """Of this machine: limits are so many times longer."""
    skips_starts: bool = False

    @property
    def bench(self) -> str:
        """Name of the result."""
        return "serve_gpu" if self.gpus == 1 else "serve_two_gpus"

    @property
    def ready_limit_s(self) -> float:
        """For replicas to take requests."""
        return 55.0 * self.slowness

    @property
    def capture_limit_s(self) -> float:
        """For their graphs, from then on."""
        return 30.0 * self.slowness

    @property
    def start_limit_s(self) -> float:
        """For one start, from nothing to nothing."""
        return self.ready_limit_s + self.capture_limit_s + 15.0

    @property
    def two_limit_s(self) -> float:
        """For two replicas and their undisturbed answers."""
        return self.start_limit_s + 15.0 * self.slowness


def plan_of(options: argparse.Namespace, folder: Path) -> Plan:
    """`folder` takes the config of a model with random weights."""
    where: dict[str, Any] = {"device": options.device, **_model(options.model, folder)}
    common = {
        "model": options.model,
        "gpus": options.gpus,
        "device": options.device,
        "skips_starts": options.skip_starts,
    }
    limit_s = options.limit_s or (225.0 if options.gpus == 1 else 385.0)
    if options.device == "cuda":
        return Plan(
            **common,
            fast=WorkerConfig(**where, max_model_len=4096, max_batch=256, kv_cache_bytes=24 << 30),
            deterministic=WorkerConfig(
                **where, max_model_len=2048, max_batch=32, kv_cache_bytes=4 << 30, prefill_chunk=256, deterministic=True
            ),
            limit_s=limit_s,
        )
    small: dict[str, Any] = {"max_model_len": 256, "max_batch": 8, "cpu_threads": 1, "kv_cache_bytes": 64 << 20}
    is_tiny = options.model == TINY
    return Plan(
        **common,
        fast=WorkerConfig(**where, **small),
        deterministic=WorkerConfig(**where, **small, graphs="fake" if is_tiny else "off", deterministic=True),
        prompt_tokens=8,
        answer_tokens=32 if is_tiny else 8,
        num_questions=4,
        rate_per_s=8.0 if is_tiny else 0.5,
        low_per_s=2.0 if is_tiny else 0.3,
        high_per_s=20.0 if is_tiny else 1.5,
        occupancy=0.25,
        limit_s=options.limit_s or 900.0,
        slowness=3.0,
    )


def _model(name: str, folder: Path) -> dict[str, Any]:
    if name == EMBEDDED:
        return {"model": "smollm2-135m"}
    if name == TINY or name in SHAPES:
        return {"model": str(write_config(name, folder).parent), "load_format": "dummy"}
    return {"model": name}
