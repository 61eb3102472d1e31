"""What the graph benchmarks share: engines over made-up weights, requests, clocks; on a GPU, or tiny on the CPU."""

from __future__ import annotations

import argparse
import contextlib
import gc
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.clocks import settle
from bench.options import bench_parser, folder_path
from bench.results_file import RESULTS, cpu_name
from bench.shapes import TINY, write_config
from worker.build import create_engine
from worker.config import Device, WorkerConfig
from worker.engine import Engine, hold_nothing
from worker.graph_runner import GraphRunner
from worker.load_causal_lm import load_causal_lm
from worker.model.source import resolve_model
from worker.request import ChoiceDelta, GenerateRequest
from worker.sampling import SamplingParams
from worker.shapes import choose_dtype

TINY_CHANGES: dict[str, Any] = {
    "graphs": "fake",
    "max_batch": 4,
    "prefill_chunk": 16,
    "kv_cache_bytes": 4 << 20,
    "block_size": 4,
    "max_model_len": None,
    "kernels": "auto",
    "max_graph_bytes": None,
}

Tokens = dict[str, list[int]]


def parser(description: str | None) -> argparse.ArgumentParser:
    """`--device cpu` runs the whole benchmark on a tiny model with emulated captures."""
    found = bench_parser(description)
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--out", type=folder_path, default=RESULTS, help="folder of the result file")
    return found


def hardware(device: str) -> str:
    """For the result file."""
    return torch.cuda.get_device_name() if device == "cuda" else cpu_name()


@dataclass(frozen=True, slots=True)
class Worker:
    """An engine and the graphs it runs from."""

    engine: Engine
    runner: GraphRunner
    config: WorkerConfig
    load_s: float
    capture_s: float

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        """Steps run without graphs inside."""
        self.engine.runner = self.runner.eager
        try:
            yield
        finally:
            self.engine.runner = self.runner

    def close(self) -> None:
        """Release graphs and memory."""
        self.runner.session.close()
        self.engine.kv_cache.storage = torch.empty(0)


def build(model: str, device: Device, *, hold_s: Callable[[int], float] = hold_nothing, **changes: Any) -> Worker:
    """An engine over random weights of a public shape, with every graph captured. `hold_s`: see EngineParts."""
    if device == "cpu":
        changes |= TINY_CHANGES | {key: changes[key] for key in ("use_graph_pool",) if key in changes}
    with tempfile.TemporaryDirectory() as folder:
        name = TINY if device == "cpu" else model
        config = WorkerConfig(
            model=str(write_config(name, Path(folder))),
            load_format="dummy",
            device=device,
            **changes,
        )
        return start(config, hold_s=hold_s)


def start(config: WorkerConfig, *, hold_s: Callable[[int], float] = hold_nothing) -> Worker:
    """Load and capture."""
    began = time.perf_counter()
    files = resolve_model(config.model, load_format=config.load_format)
    device = torch.device(config.device, 0) if config.device == "cuda" else torch.device("cpu")
    served = load_causal_lm(config, files, device=device, dtype=choose_dtype(config, device.type))
    settle(config.device)
    loaded = time.perf_counter()
    engine = create_engine(config, files, served, None, hold_s=hold_s)
    while engine.prepare_next():
        pass
    settle(config.device)
    assert isinstance(engine.runner, GraphRunner)
    return Worker(engine, engine.runner, config, loaded - began, time.perf_counter() - loaded)


def attempt(part: Callable[..., Any], *args: Any) -> Any:
    """What `part` returns; a part that fails must not lose the others, and says so in the result."""
    try:
        return part(*args)
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


def free_memory() -> None:
    """Between two engines."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prompt(length: int, seed: int, vocab: int) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def submit(engine: Engine, name: str, ids: Sequence[int], max_tokens: int) -> None:
    """One greedy request; nothing of its prompt is taken from an earlier one."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add(GenerateRequest(request_id=name, prompt_token_ids=tuple(ids), sampling=sampling, use_prefix_cache=False))


def step(engine: Engine, tokens: Tokens) -> None:
    """One step; its tokens are added to `tokens`."""
    for event in engine.step():
        assert isinstance(event, ChoiceDelta), event
        tokens.setdefault(event.request_id, []).extend(event.token_ids)


def answers(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> Tokens:
    """All prompts together, to the end."""
    tokens: Tokens = {}
    for number, ids in enumerate(prompts):
        submit(engine, str(number), ids, max_tokens)
    while engine.has_work:
        step(engine, tokens)
    return tokens


def agreement(ours: Tokens, theirs: Tokens) -> float:
    """Part of the tokens that are equal, place by place."""
    pairs = [(a, b) for name in theirs for a, b in zip(ours[name], theirs[name], strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def first_agreement(ours: Tokens, theirs: Tokens) -> float:
    """Part of the answers whose first token is equal: later ones of made-up weights follow from any near-tie."""
    return sum(ours[name][0] == theirs[name][0] for name in theirs) / len(theirs)


def decode_step_ms(engine: Engine, batch: int, length: int, num_steps: int, device: str) -> float:
    """Milliseconds of an engine step, over a run of them that overlap as they do in service."""
    tokens = decoding_rows(engine, batch, length, num_steps)
    for _ in range(3):
        step(engine, tokens)
    settle(device)
    began = time.perf_counter()
    for _ in range(num_steps):
        step(engine, tokens)
    settle(device)
    took = time.perf_counter() - began
    assert len(engine.scheduler.running) == batch
    cancel_all(engine)
    return 1e3 * took / num_steps


def decoding_rows(engine: Engine, batch: int, length: int, num_steps: int) -> Tokens:
    """`batch` rows that all decode, and will for `num_steps` steps and some more."""
    tokens: Tokens = {}
    room = engine.info.max_model_len - length
    # While the last prompts are computed, the first rows decode already.
    max_tokens = min(num_steps + 16 + 2 * batch, room)
    for row in range(batch):
        submit(engine, f"row{row}", prompt(length, row, engine.info.vocab_size), max_tokens)
    while engine.scheduler.waiting or any(not row.is_decoding for row in engine.scheduler.running):
        step(engine, tokens)
    assert len(engine.scheduler.running) == batch
    return tokens


def cancel_all(engine: Engine) -> None:
    """End whatever runs."""
    for name in list(engine.live_request_ids):
        engine.cancel(name)
    while engine.has_work:
        engine.step()
    engine.flush()
