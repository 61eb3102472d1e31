"""Every command line in the documents can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from cluster.cli.app import app
from cluster.serve_app import pool_config

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "operations.md", ROOT / "docs" / "architecture.md"]
LINE = re.compile(r"(?:^ {4}|`)(graphpool [^`\n]*)", re.MULTILINE)


def command_lines(document: Path) -> list[str]:
    return [line.partition("  #")[0].strip() for line in LINE.findall(document.read_text())]


def options_of(command: Any) -> set[str]:
    return {flag for parameter in command.params for flag in parameter.opts if flag.startswith("-")}


def named(command: Any, words: list[str]) -> Any:
    """The command itself, or the one of its group that the words go on with."""
    commands = getattr(command, "commands", {})
    return named(commands[words[0]], words[1:]) if words and words[0] in commands else command


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_and_option_that_a_document_names_exists(document: Path) -> None:
    group = typer.main.get_group(app)
    for line in command_lines(document):
        words = shlex.split(line)[1:]
        if not words or words[0].startswith(("-", "<")):
            assert not words or words[0] in {*options_of(group), "--help"}, line
            continue
        assert words[0] in group.commands, line
        command = named(group.commands[words[0]], words[1:])
        flags = {word for word in words[1:] if word.startswith("-") and not word.lstrip("-").isdigit()}
        assert flags <= {*options_of(command), "--help"}, line


def test_the_readme_names_commands() -> None:
    assert len(command_lines(ROOT / "README.md")) >= 5


def test_the_serve_config_in_the_operations_page_is_accepted() -> None:
    import yaml

    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL)
    application = yaml.safe_load(block)["applications"][0]
    assert application["import_path"] == "cluster.serve_app:app"
    config = pool_config(application["args"])
    assert config.worker.device == "cuda"
