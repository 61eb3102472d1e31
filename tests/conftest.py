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
    """Let tests be run again where the plugin for it is there."""
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        folder = item.path.relative_to(config.rootpath / "tests").parts[0]
        item.add_marker(pytest.mark.flaky(reruns=RERUNS.get(folder, 0)))
