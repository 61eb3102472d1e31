"""An empty path, such as that of an unset variable, is refused before anything is written or left unprotected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner, Result

from cluster.cli.app import app
from cluster.cli.worker_options import parse_settings
from cluster.config import from_mapping
from worker.config import WorkerConfig

REFUSED = "is empty, must name a file or folder"


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--cache-dir", ""],
        ["router", "--tokens", ""],
        ["doctor", "deploy", ""],
        ["certs", "init", ""],
        ["certs", "issue", "", "client"],
        ["tokens", "pool", ""],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_wrong_usage_that_names_the_option(arguments: list[str]) -> None:
    done = _invoke(*arguments)
    assert done.exit_code == 2
    assert f"Invalid value for '{arguments[1] if arguments[1].startswith('-') else ''}" in done.output
    assert REFUSED in done.output


def test_no_option_of_any_command_takes_an_empty_path() -> None:
    found = [(*words, option) for words, option in _path_options(typer.main.get_group(app))]
    assert {words[0] for words in found} == {
        *["serve", "worker", "router", "chat", "generate", "status", "top", "drain", "plan", "doctor", "tokens"]
    }
    for words in found:
        done = _invoke(*words, "")
        assert (done.exit_code, REFUSED in done.output) == (2, True), words


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})


def _path_options(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], str]]:
    for one in command.params:
        if one.metavar in ("FILE", "DIR") and one.opts[0].startswith("--"):
            yield words, one.opts[0]
    for name, one in getattr(command, "commands", {}).items():
        yield from _path_options(one, *words, name)


def test_a_file_of_settings_and_set_name_the_field() -> None:
    with pytest.raises(ValueError, match=r"^cache_dir is '', must name a file or folder$"):
        from_mapping(WorkerConfig, {"cache_dir": ""})
    with pytest.raises(ValueError, match=r"^cache_dir is '', must name a file or folder$"):
        parse_settings(["cache_dir=''"])
    with pytest.raises(ValueError, match=r"^model is '', must name one$"):
        WorkerConfig(model="")


@pytest.mark.parametrize("setting", ["cache_dir=", "model=", "max_batch="])
def test_a_setting_without_a_value_is_not_taken_for_the_default(setting: str) -> None:
    with pytest.raises(ValueError, match=f"--set {setting}: expected NAME=VALUE"):
        parse_settings([setting])
