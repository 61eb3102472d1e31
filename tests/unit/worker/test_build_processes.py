"""Kernels are compiled in processes of their own, and whatever goes wrong there is only slower."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.build_jobs import Does, a_call, children, dies, hangs, is_alive, wait_until
from worker.kernels import build_processes
from worker.kernels.build_job import BuildJob
from worker.kernels.build_processes import BuildProcesses, start_build_processes

jit = pytest.importorskip("triton.runtime.jit")
ROOT = Path(__file__).resolve().parents[3]


def double(x: int) -> int:
    return 2 * x


KERNEL = jit.JITFunction(double)
vars(jit)["double"] = KERNEL  # found by its module and name, which importlib mode gives this file none of
KERNEL.__module__ = jit.__name__


@pytest.fixture
def two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a kernel."""
    monkeypatch.setenv("LIMIT_S", "2")


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BuildProcesses]:
    """Two that have nothing to import first."""
    monkeypatch.setattr(build_processes, "SERVER", "tests.fakes.bare_build_server")
    made = BuildProcesses(2)
    yield made
    made.close()
    made._process.wait(20)


@pytest.fixture
def forks(processes: BuildProcesses) -> list[int]:
    """Of `processes`, when both are there."""
    wait_until(lambda: len(children(processes._process.pid)) == 2)
    return children(processes._process.pid)


def test_a_job_names_its_kernel_and_holds_the_rest() -> None:
    from triton.runtime.jit import JITFunction

    job = BuildJob.unpickled(BuildJob.of(a_call((KERNEL, 7))).pickled())
    assert isinstance(KERNEL, JITFunction)
    assert job.source[0] is KERNEL
    assert (job.source[1], job.target) == (7, "nothing")
    assert (job.options, job.env_vars) == ({"num_warps": 4}, {"name": "value"})


def test_a_call_of_another_shape_is_refused_without_a_process(processes: BuildProcesses) -> None:
    assert not processes.build(lambda: None)
    assert not processes.build(a_call(threading.Lock()))
    assert not processes._jobs


def test_what_cannot_be_compiled_is_refused_and_said_once(
    processes: BuildProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "worker.kernels.build_processes"):
        assert not processes.build(a_call("no kernel"))
        assert not processes.build(a_call("no kernel either"))
    said = [record.levelname for record in caplog.records if "not in another: AttributeError" in record.message]
    assert said == ["WARNING", "DEBUG"]


def test_a_job_larger_than_any_pipe_arrives(processes: BuildProcesses) -> None:
    assert processes.build(a_call(Does(str.encode, "x" * (8 << 20))))


def test_a_server_that_is_killed_refuses_what_is_open_and_what_comes_later_at_once(
    processes: BuildProcesses, forks: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(2) as threads:
        built = [threads.submit(processes.build, hangs()) for _ in range(2)]
        wait_until(lambda: len(processes._jobs) == 2)
        started = time.monotonic()
        processes._process.kill()
        assert not any(result.result() for result in built)
    assert not processes.build(a_call("no kernel"))
    assert time.monotonic() - started < 10
    wait_until(lambda: not any(map(is_alive, forks)))
    said = ["kernels are built in this process from now on: their server has ended (exit code -9)"]
    wait_until(lambda: [record.message for record in caplog.records] == said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_end_takes_its_processes_along(
    processes: BuildProcesses, forks: list[int], number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    os.kill(processes._process.pid, number)
    wait_until(lambda: not any(map(is_alive, [processes._process.pid, *forks])))
    assert "Traceback" not in capfd.readouterr().err


def test_a_process_that_dies_loses_its_own_kernel_and_another_takes_its_place(
    processes: BuildProcesses, forks: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assert not processes.build(dies())
    assert "the process that compiled it ended with exit code 9" in caplog.text
    idle = next(pid for pid in forks if is_alive(pid))
    os.kill(idle, signal.SIGKILL)
    wait_until(lambda: idle not in children(processes._process.pid))
    for _ in range(3):
        assert processes.build(a_call(Does(bytes)))
    assert is_alive(processes._process.pid)


@pytest.mark.usefixtures("two_seconds")
def test_a_kernel_that_hangs_is_given_up_and_what_it_has_started_with_it(
    processes: BuildProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    assert not processes.build(a_call(Does(subprocess.run, ["sleep", "61.5"])))
    assert "it took longer than 2 s" in caplog.text
    wait_until(lambda: processes.build(a_call(Does(bytes))))
    wait_until(lambda: not _runs("61.5"))


def test_a_server_that_hangs_is_ended_when_a_kernel_is_late(
    processes: BuildProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where what it was sent fills the pipe, and others wait to send."""
    assert processes.build(a_call(Does(bytes)))
    os.kill(processes._process.pid, signal.SIGSTOP)
    processes._jobs._limit_s = 0.5
    with ThreadPoolExecutor(3) as threads:
        jobs = [a_call(Does(str.encode, "x" * (4 << 20))) for _ in range(3)]
        assert not any(threads.map(processes.build, jobs))
    wait_until(lambda: "nothing came of any within" in caplog.text)
    assert not processes.build(a_call(Does(bytes)))


def test_closing_ends_the_server_what_it_is_at_and_says_nothing(
    processes: BuildProcesses, forks: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadPoolExecutor(1) as threads:
        built = threads.submit(processes.build, hangs())
        wait_until(lambda: len(processes._jobs) == 1)
        processes.close()
        processes.close()
        assert not built.result(10)
    wait_until(lambda: not any(map(is_alive, [processes._process.pid, *forks])))
    assert not caplog.records


def test_nothing_is_left_of_processes_that_nobody_refers_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_processes, "SERVER", "tests.fakes.bare_build_server")
    before = _open_files(), threading.active_count()
    gc.disable()  # as while a worker starts
    try:
        for _ in range(3):
            made = BuildProcesses(1)
            assert made.build(a_call(Does(bytes)))
            process = made._process
            del made
            process.wait(20)
        wait_until(lambda: _open_files() <= before[0] and threading.active_count() <= before[1])
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "ending", ["os.kill(os.getpid(), 9)", "sys.exit()", "raise KeyboardInterrupt", "os.execv('/bin/true', ['true'])"]
)
def test_no_process_outlives_whoever_started_it(ending: str) -> None:
    script = f"""
import os, sys, threading, time
from tests.fakes.build_jobs import children, hangs, wait_until
from worker.kernels import build_processes
build_processes.SERVER = "tests.fakes.bare_build_server"
made = build_processes.BuildProcesses(2)
pid = made._process.pid
wait_until(lambda: len(children(pid)) == 2)
threading.Thread(target=made.build, args=(hangs(),), daemon=True).start()
wait_until(lambda: len(made._jobs) == 1)
print(pid, *children(pid), flush=True)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3, done.stderr
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_terminals_interrupt_is_the_parents_alone(processes: BuildProcesses) -> None:
    assert os.getpgid(processes._process.pid) == processes._process.pid != os.getpgid(0)


def test_signals_that_the_parent_ignores_or_blocks_end_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build_processes, "SERVER", "tests.fakes.bare_build_server")
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        made = BuildProcesses(1)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    assert made.build(a_call(Does(bytes)))
    made._process.terminate()
    assert made._process.wait(20) == -signal.SIGTERM


def test_few_cores_have_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_processes, "usable_cores", lambda: 3)
    assert start_build_processes() is None


def _fails_with(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise type(error)(*error.args)

    return fail


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("subprocess.Popen", OSError("no more processes")),
        ("threading.Thread.start", RuntimeError("no more threads")),
        ("worker.kernels.build_processes.Pipe", OSError("no more files")),
    ],
)
def test_a_machine_without_another_process_thread_or_file_builds_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str, error: Exception
) -> None:
    monkeypatch.setattr(build_processes, "usable_cores", lambda: 8)
    before = _open_files()
    with monkeypatch.context() as patch:
        patch.setattr(what, _fails_with(error))
        assert start_build_processes() is None
    assert f"built in this process alone: {error}" in caplog.text
    assert _open_files() == before
    assert not children(os.getpid()) or not any("build_main" in _command(pid) for pid in children(os.getpid()))


def test_a_server_without_a_place_to_write_or_a_log_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service may run without HOME, without TMPDIR, and with its standard streams closed."""
    script = """
import os
from tests.fakes.build_jobs import Does, a_call
from worker.kernels import build_processes
build_processes.SERVER = "tests.fakes.bare_build_server"
for number in range(3):
    os.close(number)
made = build_processes.BuildProcesses(1)
os._exit(7 if made.build(a_call(Does(bytes))) else 1)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env={}, timeout=30)
    assert done.returncode == 7


def test_modules_in_the_working_folder_are_not_the_servers(tmp_path: Path) -> None:
    """It imports what this process would, and this process need not be one that looks there."""
    (tmp_path / "worker.py").write_text("raise SystemExit(3)")
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from tests.fakes.build_jobs import Does, a_call
from worker.kernels import build_processes
build_processes.SERVER = "tests.fakes.bare_build_server"
os.chdir({str(tmp_path)!r})
sys.exit(not build_processes.BuildProcesses(1).build(a_call(Does(bytes))))
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_answers_are_text_that_nothing_unpickles(processes: BuildProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "loads", _fails_with(AssertionError("unpickled")))
    assert processes.build(a_call(Does(bytes)))


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _runs(argument: str) -> bool:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return any(_command(pid).startswith(f"sleep {argument}") and is_alive(pid) for pid in pids)
