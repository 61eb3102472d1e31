"""A peer that fails is named and loses nobody else's figures; what a process prints is read by its mark."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from bench import side_by_side
from bench.report_tables import tables_of
from bench.results_file import Results

ROWS = [
    {"metric": "decode_step_ms", "unit": "ms", "batch": 1, "value": 2.5},
    {"metric": "ttft_ms", "unit": "ms", "batch": 1, "context": 128, "value": 9.0},
]


def test_only_the_marked_line_of_a_process_counts() -> None:
    script = "print('loading'); print('RESULT {\\\"rows\\\": []}'); print('bye')"
    assert side_by_side.read([sys.executable, "-c", script.replace("\\", "")], {}) == {"rows": []}


def test_a_process_without_a_result_is_an_error_with_what_it_printed() -> None:
    with pytest.raises(RuntimeError, match="ended with 3: no device"):
        side_by_side.read([sys.executable, "-c", "print('no device'); raise SystemExit(3)"], {})


def test_a_peer_that_fails_is_named_and_the_others_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def by_itself(system: str, *_: Any) -> dict[str, Any]:
        answers = [[1, 5], [2, 6]] if system == "transformers" else [[1, 5], [3, 6]]
        return {"rows": ROWS, "answers": answers}

    def broken(*_: Any) -> dict[str, Any]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(side_by_side, "by_itself", by_itself)
    monkeypatch.setattr(side_by_side, "vllm_peer", broken)
    monkeypatch.setattr(Results, "write", lambda self: tmp_path)
    results = Results(bench="side_by_side", hardware="a GPU")
    side_by_side.compare("m", tmp_path, tmp_path, results)
    assert results.correctness == {
        "m hf_static_graph": "2 of 2 first tokens equal",
        "m graphpool": "1 of 2 first tokens equal",
        "m vllm": "failed: out of memory",
    }
    document = {
        "bench": "side_by_side", "date": "2026-11-30", "command": "c", "hardware": "a GPU", "versions": {},
        "rows": [
            {"system": row.system, "model": row.model, "metric": row.metric, "unit": row.unit, "value": row.value,
             "scope": row.scope, "batch": row.batch, "context": row.context}
            for row in results.rows
        ],
    }  # fmt: skip
    assert "| m | 128 | 9 | 9 |" in tables_of(document)
