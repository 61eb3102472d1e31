"""One replica as Ray Serve hosts it: a plain class, wrapped as a deployment in `cluster.serve_app`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config import ReplicaConfig, from_mapping
from cluster.replica.lifecycle import State
from cluster.replica.start_times import StartTimes
from cluster.served_place import placed
from cluster.tracing import configure_tracing
from worker.config import WorkerConfig
from worker.errors import Draining

ROUTED_WITHIN_S = 10.0
"""How long a new replica waits to be known to its routers before it tells Serve that it is there.

Serve then takes the next old one away: it must not be gone before each router has the new one. Without any router there
is nobody to lose, and Serve is not kept waiting for good.
"""


class ServedReplica:
    """Serve constructs it, asks `check_health`, and awaits `__del__` when it takes the replica away.

    Requests never come this way: the replica opens a gRPC port of its own, and routers hear of it by announcement.
    WorkerConfig and ReplicaConfig come as plain values by name: pickled, they would be read by the order of their fields,
    which another version may have changed. One that does not know a name refuses it (ValueError).
    """

    async def __init__(  # type: ignore[misc]
        self, worker: Mapping[str, Any], config: Mapping[str, Any], drain_timeout_s: float
    ) -> None:
        from cluster.replica_process import ReplicaProcess

        self._process: ReplicaProcess | None = None
        times = StartTimes()
        times.over("placed")
        self._drain_timeout_s = drain_timeout_s
        configure_tracing("graphpool-replica")
        worker_config, replica_config = from_mapping(WorkerConfig, worker), from_mapping(ReplicaConfig, config)
        self._process = await ReplicaProcess.open(worker_config, await placed(replica_config), times=times)
        await self._process.server.wait_routed(ROUTED_WITHIN_S)

    async def reconfigure(self, changed: Mapping[str, Any]) -> None:
        """Take what may change while the replica runs. Serve calls it after the start, too.

        The config it comes from has checked it: Serve ends a replica that raises here.
        """
        assert self._process is not None, "Serve changes no replica before it has started"
        self._drain_timeout_s = float(changed["drain_timeout_s"])
        self._process.server.announce_to(changed["routers"])

    async def check_health(self) -> None:
        """Raise when the engine makes no progress although it has work, or the replica was drained by request.

        A drained one would hold its GPU and serve nobody: Serve puts a new one in its place.
        """
        assert self._process is not None, "Serve checks no replica before it has started"
        server = self._process.server
        if server.state is State.STOPPED:
            raise Draining(f"replica {server.name} was drained")
        server.check()

    async def __del__(self) -> None:
        """Take nothing new, finish what is running, then go. Serve also calls this when the start has failed."""
        if self._process is not None:
            await self._process.close(grace_s=self._drain_timeout_s)
