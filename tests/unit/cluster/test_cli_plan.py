"""`graphpool plan`: tables, JSON, exit codes."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli.app import app
from cluster.cli.byte_sizes import parse_bytes, show_bytes
from tests.fakes.checkpoints import config_dict, write_config
from tests.fakes.command_line import command
from worker.config import WorkerConfig

GIB = 1 << 30
WIDE = {"COLUMNS": "200", "TERM": "dumb"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_config(tmp_path, config_dict("llama")))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments, "--gpu-memory", "8GiB", "--kv-cache-mib", "64"], env=WIDE)


def as_json(*arguments: str) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("141GB", 141 * 10**9), ("24GiB", 24 * GIB), ("1.5g", 3 * GIB // 2), ("512 MB", 512 * 10**6), ("4096", 4096)],
)
def test_amounts_of_memory_are_read_as_written(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "12 apples", "-1GB", "0", "1e400GB"])
def test_other_amounts_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="amount of memory"):
        parse_bytes(text)


def test_amounts_are_shown_with_the_digits_that_matter() -> None:
    assert [show_bytes(size) for size in (0, 5 << 20, 3 * GIB, 120 * GIB)] == [
        *("0.0 MiB", "5.0 MiB", "3.00 GiB", "120.0 GiB")
    ]


def test_the_table_has_a_line_for_each_part_and_each_graph(model: str) -> None:
    done = run(model, "--max-batch", "4", "--prefill-chunk", "64")
    assert done.exit_code == 0, done.output
    for part in ("weights", "KV pool", "graphs", "CUDA context", "in all"):
        assert part in done.stdout
    keys = {graph["key"] for graph in as_json(model, "--max-batch", "4", "--prefill-chunk", "64")["graphs"]}
    assert len(keys) > 20
    assert all(key in done.stdout for key in keys)
    assert f"{len(keys)} of {len(keys)} graphs fit" in done.stdout


def test_the_json_adds_up(model: str) -> None:
    plan = as_json(model, "--max-batch", "4")
    parts = ("context_bytes", "weights_bytes", "kv_bytes", "inputs_bytes", "graph_bytes")
    assert sum(plan[part] for part in parts) == plan["used_bytes"]
    assert plan["kv_bytes"] == plan["kv_blocks"] * plan["kv_block_bytes"]
    assert plan["fits"] is True
    assert [graph["order"] for graph in plan["graphs"]] == list(range(1, len(plan["graphs"]) + 1))


def test_options_reach_the_plan(model: str) -> None:
    plan = as_json(model, "--tiers", "16,32,64,128", "--max-model-len", "128", "--buckets", "1,3", "--max-batch", "3")
    assert (plan["tiers"], plan["buckets"]) == ([16, 32, 64, 128], [1, 3])
    assert as_json(model, "--graphs", "off")["graphs"] == []
    capped = as_json(model, "--max-graph-mib", "2", "--kernels", "torch", "--max-batch", "64")
    lost = [graph for graph in capped["graphs"] if not graph["fits"]]
    assert lost
    assert all(graph["reason"] for graph in lost)


def test_the_plan_is_of_the_worker_that_no_options_make(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[WorkerConfig] = []
    monkeypatch.setattr("cluster.cli.plan._plan", lambda config, *_, **__: planned.append(config))
    assert CliRunner().invoke(app, ["plan"]).exit_code == 0
    assert planned == [WorkerConfig()]


def test_what_does_not_fit_says_why_in_the_table(model: str) -> None:
    done = run(model, "--max-graph-mib", "2", "--kernels", "torch", "--max-batch", "64")
    assert done.exit_code == 0
    assert "does not fit: the pool would hold" in " ".join(done.stdout.split())


def test_a_plan_that_cannot_start_ends_with_exit_code_one(model: str) -> None:
    done = CliRunner().invoke(app, ["plan", model, "--gpu-memory", "500MiB"], env=WIDE)
    assert done.exit_code == 1
    assert "could not start" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tiers", "8,4,2,1"], "tiers"),
        (["--gpu-memory", "much"], "amount of memory"),
        (["--block-size", "16", "--prefill-chunk", "40"], "prefill_chunk"),
    ],
)
def test_a_wrong_option_is_one_sentence(model: str, arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["plan", model, *arguments], env=WIDE)
    assert done.exit_code in (1, 2)
    assert words in done.output
    assert "Traceback" not in done.output


def test_measuring_needs_a_gpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(app, ["plan", model, "--measure"], env=WIDE)
    assert done.exit_code == 1
    assert "needs a GPU" in done.output


def test_expected_and_measured_stand_side_by_side(model: str) -> None:
    from cluster.cli.plan_tables import plan_report, plan_values
    from worker.config import WorkerConfig
    from worker.memory_measure import measure_memory
    from worker.memory_plan import plan_memory

    values: Any = {"model": model, "load_format": "dummy", "dtype": "float32", "max_batch": 2, "prefill_chunk": 16}
    values |= {"kv_cache_bytes": 4 << 20}
    measured = measure_memory(WorkerConfig(device="cpu", graphs="fake", **values))
    plan = plan_memory(WorkerConfig(**values), 8 * GIB)
    found = plan_values(plan, measured)
    assert found["measured"]["weights_bytes"] == found["weights_bytes"]
    assert found["measured"]["kv_bytes"] == found["kv_bytes"]
    assert all("measured_pool_bytes" in graph for graph in found["graphs"])
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan_report(plan, measured))
    text = console.export_text()
    assert "instantiate ms" in text
    assert "+0.0 %" in text


def test_neither_torch_nor_ray_is_loaded_for_the_help() -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from cluster.cli.app import app; "
        "[CliRunner().invoke(app, [name, '--help']) for name in ('plan', 'doctor')]; "
        "print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([command()[0], "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
