"""What deterministic mode costs: its steps and first tokens against those of the fast mode, in one run.

    python -m bench.deterministic [--device cpu] [MODEL ...]

On a GPU: random bf16 weights of public shapes, every graph captured. On the CPU: the embedded model on one thread, whose own
time is taken, so that other work on the machine counts as little as can be. A mode counts only if its
answers alone and in a batch were compared: the deterministic ones must be equal to the token. Writes
`bench/results/deterministic.json`; the rows of the other device are kept.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from bench.clocks import settle
from bench.engine_runs import (
    Tokens,
    agreement,
    answers,
    cancel_all,
    decode_step_ms,
    decoding_rows,
    free_memory,
    parser,
    prompt,
    step,
)
from bench.options import parse_for_gpu
from bench.results_file import Results, Row, cpu_name, versions
from bench.shapes import write_config
from worker.build import create_engine
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.load_causal_lm import load_causal_lm
from worker.model.source import resolve_model
from worker.shapes import choose_dtype

Device = Literal["cpu", "cuda"]
MODELS = {"cuda": ["smollm2-135m", "llama-3.2-1b"], "cpu": ["smollm2-135m"]}
BATCHES = {"cuda": (1, 8, 32, 256), "cpu": (1, 2, 8, 16)}
STEPS = {"cuda": 60, "cpu": 15}
CHECKED = {"cuda": 8, "cpu": 3}
ROUNDS = {"cuda": 15, "cpu": 3}
PROMPTS = (128, 1024)
SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {"max_batch": 256, "buckets": (1, 8, 32, 256), "max_model_len": 4096, "kv_cache_bytes": 12 << 30},
    "cpu": {},
}
Engines = dict[bool, Engine]
"""By whether they are deterministic."""
Values = dict[bool, float]
SYSTEMS = {False: "graphpool", True: "graphpool_deterministic"}


def build(name: str, device: Device, folder: Path, *, deterministic: bool) -> Engine:
    """An engine with all its graphs."""
    embedded = device == "cpu"
    config = WorkerConfig(
        model=name if embedded else str(write_config(name, folder)),
        load_format="auto" if embedded else "dummy",
        device=device,
        deterministic=deterministic,
        **SHAPES[device],
    )
    files = resolve_model(config.model, load_format=config.load_format)
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    served = load_causal_lm(config, files, device=place, dtype=choose_dtype(config, device))
    engine = create_engine(config, files, served, None)
    while engine.prepare_next():
        pass
    return engine


def cuda_steps_ms(engines: Engines, batch: int) -> Values:
    """Milliseconds of a decode step of `batch` rows, over runs of steps that overlap as they do in service."""
    rounds = [
        {mode: decode_step_ms(engine, batch, 128, STEPS["cuda"], "cuda") for mode, engine in engines.items()}
        for _ in range(3)
    ]
    return {mode: median(found[mode] for found in rounds) for mode in engines}


def cpu_steps_ms(engines: Engines, batch: int) -> Values:
    """Milliseconds of the one thread that computes, in the quickest of some steps for each mode, which take turns."""
    tokens = {mode: decoding_rows(engine, batch, 128, STEPS["cpu"]) for mode, engine in engines.items()}
    best = dict.fromkeys(engines, math.inf)
    for _ in range(STEPS["cpu"]):
        for mode, engine in engines.items():
            began = time.thread_time()
            step(engine, tokens[mode])
            best[mode] = min(best[mode], 1e3 * (time.thread_time() - began))
    for engine in engines.values():
        cancel_all(engine)
    return best


def first_token_ms(engines: Engines, length: int, device: Device) -> Values:
    """Milliseconds from submission to the first token of a lone prompt: the median, or on the CPU the least."""
    some = next(iter(engines.values()))
    ids = prompt(length, length, some.info.vocab_size)
    rounds = [{mode: once_ms(engine, ids, device) for mode, engine in engines.items()} for _ in range(ROUNDS[device])]
    pick = median if device == "cuda" else min
    return {mode: pick([found[mode] for found in rounds]) for mode in engines}


def once_ms(engine: Engine, ids: Sequence[int], device: Device) -> float:
    """One prompt, on an idle device."""
    clock = time.perf_counter if device == "cuda" else time.thread_time
    settle(device)
    began = clock()
    answers(engine, [ids], 1)
    settle(device)
    return 1e3 * (clock() - began)


def check(engine: Engine, batch: int) -> dict[str, float]:
    """Answers of a batch against the same requests alone."""
    prompts = [prompt(40 + 17 * row, row, engine.info.vocab_size) for row in range(batch)]
    together = answers(engine, prompts, 24)
    alone: Tokens = {}
    for row, ids in enumerate(prompts):
        alone[str(row)] = answers(engine, [ids], 24)["0"]
    return {"tokens_equal_to_those_alone": agreement(together, alone)}


def measure(name: str, device: Device, folder: Path, results: Results) -> None:
    """Both modes of one model, turn by turn, so that what else the machine does meets both."""
    engines = {mode: build(name, device, folder, deterministic=mode) for mode in SYSTEMS}
    for mode, engine in engines.items():
        checked = check(engine, CHECKED[device])
        results.correctness[f"{name}, {device}, {SYSTEMS[mode]}"] = checked
        assert not mode or checked["tokens_equal_to_those_alone"] == 1.0, checked
    for batch in BATCHES[device]:
        found = cuda_steps_ms(engines, batch) if device == "cuda" else cpu_steps_ms(engines, batch)
        add(results, found, model=name, note=device, metric="decode_step_ms", batch=batch, context=128)
    for length in PROMPTS:
        found = first_token_ms(engines, length, device)
        add(results, found, model=name, note=device, metric="ttft_ms", batch=1, context=length)


def add(results: Results, values: Values, **what: Any) -> None:
    """One value of each mode."""
    for mode, value in values.items():
        results.add(system=SYSTEMS[mode], scope="replica", unit="ms", value=value, **what)


def ratios(rows: list[Row]) -> list[dict[str, Any]]:
    """Deterministic over fast, for the times of steps and first tokens."""
    fast, slow = (
        {
            (row.note, row.model, row.metric, row.batch, row.context): row.value
            for row in rows
            if row.system == system and row.unit == "ms"
        }
        for system in SYSTEMS.values()
    )
    names = ("device", "model", "metric", "batch", "context")
    return [dict(zip(names, key, strict=True)) | {"ratio": slow[key] / fast[key]} for key in fast if key in slow]


def kept(path: Path, device: Device) -> dict[str, Any]:
    """What an earlier run found on the other device."""
    if not path.exists():
        return {"rows": [], "correctness": {}, "hardware": ""}
    before: dict[str, Any] = json.loads(path.read_text())
    before["rows"] = [row for row in before["rows"] if row.get("note") != device]
    before["correctness"] = {key: value for key, value in before["correctness"].items() if f", {device}," not in key}
    return before if before["rows"] else {"rows": [], "correctness": {}, "hardware": ""}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("models", nargs="*")
    options = parse_for_gpu(arguments)
    device: Device = options.device
    if device == "cpu":
        torch.set_num_threads(1)
    before = kept(options.out / "deterministic.json", device)
    own = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    others = [part for part in before["hardware"].split("; ") if part and part != own]
    results = Results(bench="deterministic", hardware="; ".join([own, *others]))
    results.correctness |= before["correctness"]
    results.rows += [Row(**row) for row in before["rows"]]
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models or MODELS[device]:
            measure(name, device, Path(folder), results)
            free_memory()
    found = {"hardware": own, "date": datetime.now(UTC).isoformat(timespec="seconds"), "versions": versions()}
    results.extra["runs"] = before.get("runs", {}) | {device: found}
    results.extra["ratios"] = ratios(results.rows)
    print(results.write(options.out))
    for line in results.extra["ratios"]:
        print(*(line[name] for name in ("device", "model", "metric", "batch", "context")), f"{line['ratio']:.2f}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
