"""The server of processes that compile: it serves with as many as it gets, and forks before it has any thread."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.build_jobs import Does, a_call, children, dies, is_alive, wait_until
from worker.kernels import build_processes
from worker.kernels.build_processes import BuildProcesses

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[3]


@contextmanager
def bare_server(monkeypatch: pytest.MonkeyPatch, num: int, **limits: int) -> Iterator[BuildProcesses]:
    monkeypatch.setattr(build_processes, "SERVER", "tests.fakes.bare_build_server")
    for name, limit in limits.items():
        monkeypatch.setenv(name, str(limit))
    made = BuildProcesses(num)
    yield made
    made.close()
    made._process.wait(20)


@pytest.mark.parametrize("limits", [{"NUM_FORKS": 1}, {"MAX_FILES": 6}])
def test_where_fewer_can_be_forked_those_serve(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], limits: dict[str, int]
) -> None:
    said = ""

    def has_said() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "kernels are built in 1 processes, not 3" in said

    with bare_server(monkeypatch, 3, **limits) as made:
        wait_until(has_said)
        for _ in range(3):
            assert made.build(a_call(Does(bytes)))
        assert len(children(made._process.pid)) == 1


def test_where_none_can_be_forked_the_caller_builds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with bare_server(monkeypatch, 3, NUM_FORKS=0) as made:
        assert not made.build(a_call(Does(bytes)))
        wait_until(lambda: "built in this process from now on: their server has ended (exit code 0)" in caplog.text)


def test_the_last_process_that_dies_and_has_no_successor_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with bare_server(monkeypatch, 2, NUM_FORKS=1) as made:
        assert not made.build(dies())
        assert not made.build(a_call(Does(bytes)))
        assert made._process.wait(20) == 0


def test_a_server_whose_parent_has_gone_before_it_looks_ends() -> None:
    """Also if another process still holds the parent's end of the pipe."""
    from multiprocessing.connection import Pipe

    ours, theirs = Pipe()
    with ours, theirs:
        command = [sys.executable, "-m", "tests.fakes.bare_build_server", "1", "1"]
        assert subprocess.run(command, cwd=ROOT, stdin=theirs.fileno(), timeout=20).returncode == 0


def test_a_server_that_has_imported_all_kernels_has_one_thread_and_no_gpu() -> None:
    """A fork would have none of the others, and would wait for their locks; nor could it use a GPU."""
    script = """
import os, sys
from pathlib import Path
from worker.kernels.build_main import import_kernels
import_kernels()
assert len(os.listdir("/proc/self/task")) == 1, os.listdir("/proc/self/task")
import torch
assert not torch.cuda.is_initialized()
assert "libcuda.so" not in Path("/proc/self/maps").read_text()
assert not {"ray", "grpc", "transformers"} & set(sys.modules)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_server_that_cannot_import_what_it_needs_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('no compiler')")
    monkeypatch.syspath_prepend(tmp_path)
    made = BuildProcesses(1)
    assert not made.build(a_call(Does(bytes)))
    wait_until(lambda: "their server has ended (exit code 1)" in caplog.text)
    assert not is_alive(made._process.pid)
    assert capfd.readouterr().err.splitlines() == ["kernels cannot be built here: ImportError: no compiler"]
