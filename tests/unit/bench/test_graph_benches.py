"""Every graph benchmark runs to its end on the CPU, on a tiny model with emulated captures, and finds right answers."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import graph_text
from bench.engine_runs import attempt
from bench.graph_text import Line, first_difference
from worker.graphs.captured import CapturedGraph

FIELDS = {"system", "model", "metric", "unit", "value", "scope"}


def run(name: str, folder: Path, *arguments: str) -> Any:
    path = importlib.import_module(f"bench.{name}").main(["--device", "cpu", "--out", str(folder), *arguments])
    document = json.loads(path.read_text())
    assert document["bench"] == name
    assert document["rows"]
    assert all(set(row) >= FIELDS and row["value"] >= -1 for row in document["rows"])
    assert not [
        part for part, found in document["correctness"].items() if isinstance(found, dict) and "failed" in found
    ]
    return document


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("graph_keys", tmp_path_factory.mktemp("keys"), "--runs", "fused,private", "--steps", "90")


@pytest.mark.parametrize("name", ["fused", "private"])
def test_every_key_is_captured_measured_and_right(keys: Any, name: str) -> None:
    correctness = keys["correctness"][name]
    assert correctness["keys_quarantined"] == correctness["keys_dropped"] == {}
    assert correctness["tokens_equal_to_eager"] == 1
    lines = keys["keys"][name]
    assert len(lines) == correctness["keys_captured"]
    assert all(line["instantiate_ms"] >= 0 and line["expected_alone_bytes"] for line in lines.values())


def test_a_mixed_load_runs_from_graphs_alone(keys: Any) -> None:
    found = keys["correctness"]["fused"]
    assert found["hit_rate"] == 1
    assert found["steps"] >= 89
    assert found["requests"] > 1


def test_a_pool_of_each_graph_takes_more_than_one_pool(keys: Any) -> None:
    taken = {row["note"]: row["value"] for row in keys["rows"] if row["metric"] == "graph_bytes"}
    assert taken["fused"] < taken["private"]


@pytest.mark.slow
def test_every_way_to_order_and_to_split_gives_the_same_outputs(tmp_path: Path) -> None:
    replay = CapturedGraph.replay
    found = run("graph_ordering", tmp_path)
    assert CapturedGraph.replay is replay
    correctness = found["correctness"]
    assert correctness["engine_ordering"]["tokens_equal"] is True
    assert correctness["engine_ordering"]["waits_for_the_device"] == 0
    assert correctness["queue_ordering"]["outputs_equal"] is True
    for part in ("split_by_hand", "split_transformers"):
        ways = correctness[part]
        assert len(ways) == 7
        assert all(value < 1e-5 for value in ways.values()), ways
    ratios = {row["note"] for row in found["rows"] if row["metric"] == "speedup"}
    assert {"synchronized / event ordered", "copy stream / one stream", "MLP graphs / whole graph"} <= ratios
    keys = [row for row in found["rows"] if row["metric"] == "key_eager_over_graph"]
    assert len(keys) == correctness["engine_ordering"]["keys_compared"]


@pytest.mark.slow
def test_the_classic_examples_equal_eager(tmp_path: Path) -> None:
    found = run("graph_seeds", tmp_path)
    correctness = found["correctness"]
    assert correctness["decode"] == {"tokens_equal_to_eager": 1.0, "tokens": 32}
    assert correctness["serving"]["tokens_equal_to_eager"] == 1
    assert max(correctness["mlp"].values()) < 1e-5
    assert len(correctness["transformer"]) == 2
    metrics = {row["metric"] for row in found["rows"] if row["unit"] == "ratio"}
    assert metrics == {
        *("forward_eager_over_graph", "decode_step_eager_over_graph", "first_token_eager_over_graph"),
        *("answer_eager_over_graph", "batch_eager_over_graph"),
    }


def test_the_path_of_the_update_benchmark_runs_without_executables(tmp_path: Path) -> None:
    found = run("graph_update", tmp_path)
    assert found["table"]["steps"] == 20
    assert "emulated" in found["correctness"]["updates"]


def test_the_plan_is_compared_with_what_was_built(tmp_path: Path) -> None:
    found = run("graph_plan", tmp_path, "--kernels", "torch")
    for each in found["correctness"].values():
        assert each["weights"] == each["kv"] == 0
        assert each["kept_as_foretold"] is True


@pytest.mark.model
@pytest.mark.slow
def test_the_text_of_the_embedded_model_is_that_of_the_reference(tmp_path: Path) -> None:
    found = run("graph_text", tmp_path, "--dtypes", "float32", "--prompts", "1", "--places", "6")["correctness"][
        "float32"
    ]
    assert found["same_texts"] == found["prompts"] == 1
    assert found["same_places"] == found["places"] == 6


def test_the_reference_holds_twenty_prompts_with_their_gaps() -> None:
    lines = [Line(**line) for line in json.loads(graph_text.REFERENCE.read_text())["lines"]]
    assert len(lines) == 20
    for line in lines:
        assert line.prompt
        assert len(line.tokens) == len(line.runners_up) == len(line.gaps) == graph_text.NEW_TOKENS
        assert all(gap >= 0 for gap in line.gaps)


@pytest.mark.parametrize(
    ("tokens", "limit", "near_tie"),
    [([5, 6, 7], 0.1, None), ([5, 9, 7], 0.1, True), ([5, 9, 7], 0.01, False), ([5, 8, 7], 0.1, False)],
)
def test_a_difference_is_a_near_tie_only_for_the_runner_up_within_the_limit(
    tokens: list[int], limit: float, near_tie: bool | None
) -> None:
    line = Line(prompt=[1], tokens=[5, 6, 7], runners_up=[4, 9, 3], gaps=[2.0, 0.05, 3.0])
    found = first_difference(0, line, tokens, limit)
    assert (None if found is None else found["is_near_tie"]) == near_tie
    if found is not None:
        assert (found["place"], found["gap"]) == (1, 0.05)


def test_a_part_that_fails_is_written_down_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def part() -> None:
        raise torch.OutOfMemoryError("no memory")

    assert attempt(part) == {"failed": "OutOfMemoryError: no memory"}
    assert "no memory" in capsys.readouterr().err
