"""What the benchmark of deterministic mode makes of its measurements."""

from __future__ import annotations

import json
from pathlib import Path

from bench.deterministic import SYSTEMS, kept, ratios
from bench.results_file import Results, Row


def row(system: str, value: float, *, device: str = "cpu", batch: int = 1, unit: str = "ms") -> Row:
    metric = "decode_step_ms" if unit == "ms" else "create_s"
    return Row(
        system=system, model="m", metric=metric, unit=unit, value=value, scope="replica", batch=batch, note=device
    )


def test_ratios_are_of_what_both_modes_have_and_of_times_alone() -> None:
    fast, slow = SYSTEMS[False], SYSTEMS[True]
    rows = [row(fast, 2.0), row(slow, 3.0), row(fast, 4.0, batch=8), row(slow, 9.0, device="cuda")]
    rows += [row(fast, 1.0, unit="s"), row(slow, 5.0, unit="s")]
    found = ratios(rows)
    assert [(one["device"], one["batch"], one["ratio"]) for one in found] == [("cpu", 1, 1.5)]


def test_what_was_found_on_the_other_device_is_kept(tmp_path: Path) -> None:
    results = Results(bench="deterministic", hardware="a GPU; a CPU")
    results.rows += [row("graphpool", 1.0, device="cuda"), row("graphpool", 2.0)]
    results.correctness |= {"m, cuda, graphpool": {}, "m, cpu, graphpool": {}}
    path = results.write(tmp_path)
    before = kept(path, "cpu")
    assert [found["note"] for found in before["rows"]] == ["cuda"]
    assert list(before["correctness"]) == ["m, cuda, graphpool"]
    assert kept(tmp_path / "none.json", "cpu")["rows"] == []
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": []}))
    assert kept(path, "cuda")["hardware"] == ""
