"""One replica as Ray Serve hosts it: a plain class, wrapped as a deployment in `cluster.serve_app`."""

from __future__ import annotations

from dataclasses import replace

from cluster.config import ReplicaConfig
from worker.config import WorkerConfig

NODE_ADDRESS = "node-address"
"""As `advertise`: the address of the node that the replica is placed on."""


class ServedReplica:
    """Serve constructs it, asks `check_health`, and awaits `__del__` when it takes the replica away.

    Requests never come this way: the replica opens a gRPC port of its own, and routers hear of it by announcement.
    """

    async def __init__(self, worker: WorkerConfig, config: ReplicaConfig, drain_timeout_s: float) -> None:  # type: ignore[misc]
        from cluster.replica_process import ReplicaProcess

        self._drain_timeout_s = drain_timeout_s
        self._process = await ReplicaProcess.open(worker, placed(config))

    async def check_health(self) -> None:
        """Raise when the engine makes no progress although it has work."""
        self._process.server.check()

    async def __del__(self) -> None:
        """Take nothing new, finish what is running, then go."""
        await self._process.close(grace_s=self._drain_timeout_s)


def placed(config: ReplicaConfig) -> ReplicaConfig:
    """The same config for this very place: the node's address, and a name that a replacement takes over."""
    import ray
    from ray import serve

    name = config.name or f"replica-{serve.get_replica_context().rank.rank}"
    advertise = ray.util.get_node_ip_address() if config.advertise == NODE_ADDRESS else config.advertise
    return replace(config, name=name, advertise=advertise)
