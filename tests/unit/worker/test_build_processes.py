"""Kernels are compiled in processes of their own, and whatever goes wrong there is only slower."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from worker.kernels.build_processes import BuildProcesses, pickled_job, start_build_processes

jit = pytest.importorskip("triton.runtime.jit")
ROOT = Path(__file__).resolve().parents[3]


def double(x: int) -> int:
    return 2 * x


KERNEL = jit.JITFunction(double)
vars(jit)["double"] = KERNEL  # found by its module and name, which importlib mode gives this file none of
KERNEL.__module__ = jit.__name__


class Options:
    """Stands for a backend's."""

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)


def a_call(src: Any) -> Callable[[], Any]:
    """As Triton hands one over: its arguments are in the closure."""
    target, options, env_vars = "nothing", Options(num_warps=4), {"name": "value"}

    def compile_kernel() -> Any:
        return src, target, options, env_vars

    return compile_kernel


@pytest.fixture
def processes() -> Iterator[BuildProcesses]:
    made = BuildProcesses(1)
    yield made
    made.close()
    made._process.wait(20)


def test_a_job_names_its_kernel_and_holds_the_rest() -> None:
    from triton.runtime.jit import JITFunction

    source, target, options, env_vars = pickle.loads(pickled_job(a_call((KERNEL, 7))))
    assert isinstance(KERNEL, JITFunction)
    assert source[0] is KERNEL
    assert (source[1], target, options, env_vars) == (7, "nothing", {"num_warps": 4}, {"name": "value"})


def test_a_call_of_another_shape_is_refused_without_a_process(processes: BuildProcesses) -> None:
    assert not processes.build(lambda: None)
    assert not processes._jobs


def test_what_cannot_be_compiled_is_refused_and_the_next_is_still_tried(
    processes: BuildProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "worker.kernels.build_processes"):
        assert not processes.build(a_call("no kernel"))
        assert not processes.build(a_call("no kernel either"))
    assert caplog.text.count("was not built by another process: AttributeError") == 2


def test_a_server_that_dies_refuses_what_is_open_and_what_comes_later(processes: BuildProcesses) -> None:
    processes._process.kill()
    started = time.monotonic()
    assert not processes.build(a_call("no kernel"))
    assert not processes.build(a_call("no kernel"))
    assert time.monotonic() - started < 10


def test_closing_ends_the_server(processes: BuildProcesses) -> None:
    processes.close()
    processes.close()
    assert processes._process.wait(20) == 0


def test_the_server_ends_with_whoever_started_it() -> None:
    script = (
        "import sys, time\n"
        "from worker.kernels.build_processes import BuildProcesses\n"
        "made = BuildProcesses(1)\n"
        "print(made._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        parent.kill()
    until = time.monotonic() + 20
    while _runs(server):
        assert time.monotonic() < until
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_few_cores_have_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert start_build_processes() is None


def test_a_machine_that_starts_no_process_builds_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(subprocess, "Popen", refused)
    assert start_build_processes() is None
    assert "built in this process alone: no more processes" in caplog.text
