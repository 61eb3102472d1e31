"""What holds for every test process."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest

# Read by gRPC when it is imported, and any test may import it before one starts Ray: its fork handlers hang Ray's daemons.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Read by Triton when it is imported: without a GPU its kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# One of several test processes: threads of theirs that wait for each other on few cores cost more than they bring.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# A run in the background, or under nohup, ignores these, and so would every command that a test starts and interrupts.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# How long an example takes says more of what else the machine is doing. A machine with a GPU may lack the package.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("unhurried", deadline=None)
    settings.load_profile("unhurried")


# Real processes, clocks and networks on a machine that others use too: a failure counts if it comes again. The summary
# names every test that was run again, and why.
RERUNS = {"integration": 2, "chaos": 2, "unit": 1}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let tests be run again where the plugin for it is there, and long files begin first where several run at once."""
    if config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            item.add_marker(pytest.mark.flaky(reruns=RERUNS.get(_folder(item), 0)))
    if hasattr(config, "workerinput"):
        turns: dict[Path, tuple[bool, bool, bool]] = {}
        for item in items:
            turns[item.path] = min(_turn(item), turns.get(item.path, (True, True, True)))
        items.sort(key=lambda item: turns[item.path])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say of every test that was run again what had gone wrong: it passes for now, and is to be mended."""
    again = terminalreporter.stats.get("rerun", [])
    if again:
        terminalreporter.section("run again")
    for report in again:
        crash = getattr(report.longrepr, "reprcrash", None)
        terminalreporter.write_line(f"{report.nodeid} ({report.when}): {crash or report.longreprtext[-500:]}")


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(item.config.rootpath / "tests").parts[0]


def _turn(item: pytest.Item) -> tuple[bool, bool, bool]:
    """What has to wait for others goes before what computes, so that the end of a run is made of small parts."""
    is_of = item.get_closest_marker
    return is_of("ray") is None, is_of("slow") is None, _folder(item) == "unit"
