"""Every benchmark says what it is when asked, and one that needs a GPU says so in a line where there is none."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[3] / "bench"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text())
ON_A_GPU = {
    **{name: [] for name in ("decode_limit", "decode_tiles", "deterministic", "engine_speed", "graph_keys")},
    **{name: [] for name in ("graph_ordering", "graph_plan", "graph_seeds", "graph_text", "graph_update")},
    **{name: [] for name in ("graph_vs_eager", "kernels", "replica_grpc", "sampling", "serve_gpu", "side_by_side")},
    "chaos": ["gpu"],
    "pool_soak": ["--device", "cuda"],
}


def run(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """The exit code of `python -m bench.NAME ARGUMENTS`, in this process: torch is imported once for all."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.delitem(sys.modules, f"bench.{name}", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)
    return ended.value.code


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, ["--help"], monkeypatch) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: ")
    first_line = (FOLDER / f"{name}.py").read_text().partition('"""')[2].partition("\n")[0]
    assert first_line.removesuffix('"""') in out


@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_missing_gpu_is_one_line_and_a_failure(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(name, ON_A_GPU[name], monkeypatch) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.err.startswith(f"{name}.py: needs a CUDA GPU")
    assert not said.out


def test_every_program_that_takes_no_device_and_asks_for_a_gpu_is_looked_at() -> None:
    asking = {name for name in PROGRAMS if "_gpu(" in (FOLDER / f"{name}.py").read_text()}
    assert asking == set(ON_A_GPU)
