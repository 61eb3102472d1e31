from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.options import add_plan_options, folder_path


@dataclass(frozen=True)
class Plan:
    rows: int = 8
    step_s: float = 0.5


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser()
    add_plan_options(found, Plan(), rows="of a replica", step_s=None)
    found.add_argument("--out", type=folder_path, default=Path("results"))
    return found


def test_a_field_of_a_plan_is_an_option_of_its_type_and_value() -> None:
    assert vars(parser().parse_args([])) == {"rows": 8, "step_s": 0.5, "out": Path("results")}
    options = parser().parse_args(["--rows", "4", "--step-s", "2"])
    assert (options.rows, options.step_s, type(options.step_s)) == (4, 2.0, float)
    assert "of a replica" in parser().format_help()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["--rows", "2.5"], "--rows: invalid int value"), (["--out", ""], "--out: is empty, must name a folder")],
)
def test_what_is_none_is_refused_by_name(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(arguments)
    assert sentence in capsys.readouterr().err
