"""What holds for every test process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from hypothesis import settings

# Read by gRPC when it is imported, and any test may import it before one starts Ray: its fork handlers hang Ray's daemons.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Read by Triton when it is imported: without a GPU its kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A run in the background, or under nohup, ignores these, and so would every command that a test starts and interrupts.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# How long an example takes says more of what else the machine is doing.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
