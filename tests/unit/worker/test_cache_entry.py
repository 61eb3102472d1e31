"""A kernel that Triton's cache holds damaged is compiled again, once; one that is whole is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.compiled_offline import run_compiler
from worker.kernels.cache_entry import is_whole

pytest.importorskip("triton")


def run(cache: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """What the program printed, and its log."""
    done = run_compiler("-m", "tests.fakes.compile_damaged", *arguments, cache=cache, timeout_s=240)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found, done.stderr


@pytest.mark.slow
def test_every_damage_costs_one_compilation(tmp_path: Path) -> None:
    found, said = run(tmp_path)
    assert found.pop("nothing") == 0
    assert len(found) > 8
    assert set(found.values()) == {1}
    assert said.count("Triton's cache holds it damaged") == len(found)


@pytest.mark.slow
def test_two_starts_share_a_cache_and_one_may_lose_a_process_in_the_middle(tmp_path: Path) -> None:
    found, _ = run(tmp_path, "together")
    assert found == {"built": [False, True, True], "is_whole": True}


def test_a_folder_that_is_none_is_refused_in_words(tmp_path: Path) -> None:
    """Not by the end of the process."""
    (tmp_path / "file").write_text("")
    script = (
        "from tests.fakes.compile_damaged import *; from worker.kernels.build_main import build\n"
        "print(build(BuildJob.of(a_kernel()).pickled()))"
    )
    done = run_compiler("-c", script, cache=tmp_path / "file", timeout_s=120)
    assert "NotADirectoryError" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("code", [b"", b"\x7fE", bytes(4096), b"\x7fELF" + bytes(20)])
def test_code_that_is_cut_short_is_not_whole(code: bytes) -> None:
    assert not is_whole(code)


def test_code_in_another_format_is_taken_for_whole() -> None:
    assert is_whole(b"BC\xc0\xde" + bytes(100))
