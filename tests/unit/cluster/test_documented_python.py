"""The Python of the documents runs as it stands, against a replica with a scripted engine."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.command_line import scripted_replica

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with scripted_replica() as address:
        yield address


def readme_script() -> str:
    """The indented block of the README that begins with an import."""
    (block,) = re.findall(
        r"^    from cluster\.client import .*(?:\n(?:    .*)?)*", (ROOT / "README.md").read_text(), re.M
    )
    return "\n".join(line.removeprefix("    ") for line in block.splitlines())


def operations_script() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL)
    return str(block)


def run(script: str, address: str) -> subprocess.CompletedProcess[str]:
    assert "127.0.0.1:50050" in script
    command = [sys.executable, "-c", script.replace("127.0.0.1:50050", address)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_the_readme_streams_an_answer(address: str) -> None:
    done = run(readme_script(), address)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_operations_page_shows_answers_choices_and_an_error(address: str) -> None:
    done = run(operations_script(), address)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^0 .*\[", done.stdout, re.M)
    assert re.search(r"^1 .*\[", done.stdout, re.M)
    assert "INVALID_ARGUMENT max_tokens: " in done.stdout
