"""Result files become tables and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.plots import plot
from bench.report_tables import markdown, tables_of
from bench.results_file import RESULTS

ORIGIN = {
    "date": "2026-11-29T10:00:00+00:00",
    "command": "python -m bench.speed",
    "hardware": "NVIDIA H200",
    "versions": {"python": "3.12.3", "torch": "2.11.0"},
    "correctness": {},
}


def row(system: str, value: float, **changes: Any) -> dict[str, Any]:
    values = {"model": "m", "metric": "decode_step_ms", "unit": "ms", "scope": "step", "batch": 1}
    return values | {"system": system, "value": value} | changes


SPEED = ORIGIN | {
    "bench": "speed",
    "rows": [
        row("ours", 0.5),
        row("theirs", 2.0),
        row("ours", 1234.5, batch=8),
        row("ours", 2 << 20, unit="B", metric="graph_bytes"),
    ],
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "speed.json").write_text(json.dumps(SPEED))
    return folder


def page(tmp_path: Path, inside: str) -> Path:
    path = tmp_path / "README.md"
    path.write_text(f"# Title\n\n<!-- bench:speed -->\n{inside}<!-- /bench:speed -->\n\nThe end.\n")
    return path


def main(tmp_path: Path, results: Path, *arguments: str) -> int:
    return report.main(["--root", str(tmp_path), "--results", str(results), *arguments])


def test_systems_stand_side_by_side_with_where_the_figures_come_from() -> None:
    text = tables_of(SPEED)
    assert "| m | decode step, ms | 1 | step | 0.5 | 2 |" in text
    assert "| m | decode step, ms | 8 | step | 1,234 | - |" in text
    assert "2 MiB" in text
    assert text.endswith("NVIDIA H200, 2026-11-29, torch 2.11.0: `python -m bench.speed`")


def test_a_marked_place_is_filled_and_the_rest_of_the_page_is_left_alone(tmp_path: Path, results: Path) -> None:
    path = page(tmp_path, "old\n")
    assert main(tmp_path, results, "--no-plots") == 0
    text = path.read_text()
    assert text.startswith("# Title\n\n<!-- bench:speed -->\n| model |")
    assert text.endswith("<!-- /bench:speed -->\n\nThe end.\n")
    assert "old" not in text


def test_check_says_whether_a_page_is_out_of_date_and_changes_nothing(tmp_path: Path, results: Path) -> None:
    path = page(tmp_path, "old\n")
    before = path.read_text()
    assert main(tmp_path, results, "--check") == 1
    assert path.read_text() == before
    main(tmp_path, results, "--no-plots")
    assert main(tmp_path, results, "--check") == 0


def test_a_place_without_a_result_is_an_error(tmp_path: Path, results: Path) -> None:
    (tmp_path / "README.md").write_text("<!-- bench:nothing -->\n<!-- /bench:nothing -->\n")
    with pytest.raises(KeyError, match="nothing"):
        main(tmp_path, results)


def test_one_benchmark_can_be_shown(tmp_path: Path, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tmp_path, results, "--show", "speed") == 0
    assert "decode step, ms" in capsys.readouterr().out


def test_numbers_are_flush_right() -> None:
    assert markdown(["a", "b"], [["x", "1"]], numbers=1) == "| a | b |\n| --- | ---: |\n| x | 1 |"


KEYS = ORIGIN | {
    "bench": "graph_keys",
    "rows": [row("graphpool", 3 << 20, metric="graph_bytes", unit="B", note="private")],
    "keys": {"private": {"decode/t256/b1/default": {"expected_alone_bytes": 1 << 21, "pool_bytes": 2 << 21}}},
    "correctness": {
        "private": {"steps": 10, "hit_rate": 1.0, "allocations": 0, "keys_dropped": {"decode/t9/b9/default": "cap"}}
    },
}
ORDERING = ORIGIN | {
    "bench": "graph_ordering",
    "rows": [
        row("event ordered", 1.15, metric="speedup", unit="ratio", note="synchronized / event ordered"),
        row("graphpool", 0.9, metric="key_eager_over_graph", unit="ratio", note="prefill/t0/b16/fresh"),
        row("graphpool", 9.0, metric="key_eager_over_graph", unit="ratio", note="decode/t256/b1/default"),
    ],
}
UPDATE = ORIGIN | {
    "bench": "graph_update",
    "rows": [row("kept", 1.0, metric="step_ms"), row("updated", 2.0, metric="step_ms")],
    "table": {"keys": 45, "updates refused, by reason": {"topology changed": 3}, "choice": "keep one executable a key"},
}
TEXT = ORIGIN | {
    "bench": "graph_text",
    "rows": [row("graphpool", 19, metric="same_texts", unit="1", note="bfloat16")],
    "correctness": {
        "bfloat16": {
            "prompts": 20,
            "same_texts": 19,
            "near_ties": 1,
            "unexplained": 0,
            "places": 960,
            "same_places": 955,
            "largest_gap_turned": 0.02,
            "differences": [{"prompt": 3, "place": 7, "expected": 5, "chosen": 6, "gap": 0.0123, "is_near_tie": True}],
        }
    },
}
PLAN = ORIGIN | {
    "bench": "graph_plan",
    "rows": [row("graphpool", 0.1, metric="graphs_error", unit="ratio")],
    "plans": {
        "auto, one pool": {
            "weights_bytes": 2 << 30,
            "kv_bytes": 8 << 30,
            "graph_bytes": 110 << 20,
            "measured": {"weights_bytes": 2 << 30, "kv_bytes": 8 << 30, "graph_bytes": 100 << 20},
        }
    },
}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (KEYS, ["graph memory, MiB", "hit rate 100.0 %, 0 allocations", "private: dropped decode/t9/b9/default"]),
        (ORDERING, ["synchronized / event ordered", "1.15", "Of 2 keys, slower than eager: prefill/t0/b16/fresh"]),
        (UPDATE, ["topology changed 3", "keep one executable a key"]),
        (TEXT, ["| bfloat16 | 3 | 7 | 5 | 6 | 0.0123 |", "same texts"]),
        (PLAN, ["| auto, one pool | graphs | 110.0 | 100.0 | +10.0 % |"]),
    ],
    ids=lambda value: value["bench"] if isinstance(value, dict) else "",
)
def test_each_graph_benchmark_has_a_table_of_its_own(document: dict[str, Any], words: list[str]) -> None:
    text = tables_of(document)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("document", [SPEED, KEYS, ORDERING, UPDATE], ids=lambda it: it["bench"])
def test_a_picture_lies_beside_its_result(document: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = plot(document, tmp_path)
    assert path == tmp_path / f"{document['bench']}.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_has_nothing_to_draw_gets_no_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot(ORIGIN | {"bench": "graph_keys", "rows": [], "keys": {}}, tmp_path) is None
    assert plot(ORIGIN | {"bench": "graph_seeds", "rows": []}, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_the_committed_results_can_all_be_shown() -> None:
    for document in report.read_results(RESULTS).values():
        assert tables_of(document).count("| --- |") + tables_of(document).count("---: |") > 0


def test_steps_stand_beside_their_limit_and_their_kernels_add_up() -> None:
    kernels = [
        {"kernel": "qkv", "launches": 16, "us": 300.0, "bytes": 1 << 30, "share_of_read_speed": 0.85},
        {"kernel": "choice", "launches": 1, "us": 200.0, "bytes": 0, "share_of_read_speed": 0.0},
    ]
    steps = [
        row("graphpool", 0.5, context=128),
        row("limit", 0.4, context=128),
        row("graphpool", 0.8, context=128, metric="share_of_read_speed", unit="ratio"),
        row("graphpool generic", 1.0, context=100, note="tier 256"),
        row("graphpool generic", 3.0, context=100, note="tier 16384"),
    ]
    text = tables_of(
        ORIGIN | {"bench": "decode_limit", "rows": steps, "read_bytes_per_s": 4.2e12, "kernels": {"m b1 c128": kernels}}
    )
    assert "read at 4.20 TB/s" in text
    assert "| m | 1 | 128 | 0.5 | 0.4 | 0.8 |" in text
    assert "| qkv | 16 | 1,024 | 300.0 | 0.85 |" in text
    assert "| all | 17 | 1,024 | 500.0 |  |" in text
    assert "| generic | 1 | 1 | 3 | 3 |" in text


def test_what_was_broken_has_a_line_and_each_metric_a_column_with_its_unit() -> None:
    rows = [
        row("graphpool", value, metric=metric, unit=unit, note=note)
        for note, value in (("SIGKILL", 3), ("reset", 4))
        for metric, unit in (("moved", "answers"), ("gap_p99_ms", "ms"))
    ]
    lines = tables_of(ORIGIN | {"bench": "chaos_gaps", "rows": rows}).splitlines()
    assert lines[0] == "|  | moved, answers | gap p99, ms |"
    assert lines[2:4] == ["| SIGKILL | 3 | 3 |", "| reset | 4 | 4 |"]
