"""A build server that imports no kernels and compiles nothing: what is read is done by then.

Bytes for a source are what was built; anything else is refused as no kernel is. NUM_FORKS in its environment is how many
there can be, MAX_FILES how many files, LIMIT_S how long a kernel may take.
"""

from __future__ import annotations

import errno
import os
import resource
import sys

from worker.kernels.build_fork import BuildFork
from worker.kernels.build_job import BuildJob
from worker.kernels.build_main import take_over
from worker.kernels.build_server import BuildServer


def build(pickled: bytes) -> str:
    """See build_main.build."""
    try:
        source = BuildJob.unpickled(pickled).source
        return "" if isinstance(source, bytes) else source.fn
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"[:1000]


def fork_at_most(num: int) -> None:
    """As where a user may have so many processes."""
    fork, left = os.fork, iter(range(num))

    def fork_or_not() -> int:
        if next(left, None) is None:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return fork()

    os.fork = fork_or_not


if __name__ == "__main__":
    if "NUM_FORKS" in os.environ:
        fork_at_most(int(os.environ["NUM_FORKS"]))
    if "MAX_FILES" in os.environ:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(os.environ["MAX_FILES"]),) * 2)
    BuildFork.limit_s = float(os.environ.get("LIMIT_S", "60"))
    BuildServer(take_over(), build, num=int(sys.argv[1]), parent=int(sys.argv[2])).serve()
