from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.options import add_plan_options, folder_path, one_of, some_of


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


def test_a_list_of_names_is_taken_apart_and_an_unknown_one_refused_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", type=one_of(("small", "large")))
    parser.add_argument("--parts", type=some_of(("one", "two")), default="one,two")
    assert parser.parse_args([]) == argparse.Namespace(models=[], parts=["one", "two"])
    assert parser.parse_args(["large", "--parts", "two"]).parts == ["two"]
    for arguments in (["huge"], ["--parts", "one,three"]):
        with pytest.raises(SystemExit):
            parser.parse_args(arguments)
    said = capsys.readouterr().err
    assert "is 'huge', must be one of small, large" in said
    assert "is 'three', must be one of one, two" in said
