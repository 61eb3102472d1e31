"""grpc.health.v1 for a server that is ready or not, and for how much of it runs from captured graphs."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # the stub lacks it

from cluster.generation import SERVICE as GENERATION_SERVICE
from protos import control_pb2

Readiness: TypeAlias = control_pb2.GraphReadiness.ValueType

SERVICE = SERVICE_NAME
NAMES: dict[str, Readiness] = {
    "": control_pb2.GRAPH_READINESS_UNSPECIFIED,
    GENERATION_SERVICE: control_pb2.GRAPH_READINESS_UNSPECIFIED,
    "graphpool.v1.graphs.PARTIAL": control_pb2.GRAPH_READINESS_PARTIAL,
    "graphpool.v1.graphs.FULL": control_pb2.GRAPH_READINESS_FULL,
}
"""What is answered for, and the readiness it takes beside being ready."""


class Health:
    """Publishes whether the server takes requests, and how much of it replays graphs; watchers see it change."""

    def __init__(self) -> None:
        self._servicer = health_aio.HealthServicer()
        self._changed = asyncio.Event()
        self._state: tuple[bool, Readiness] = (False, control_pb2.GRAPH_READINESS_UNSPECIFIED)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        """What "" is answered with."""
        return self._state[0]

    async def start(self, server: grpc.aio.Server) -> None:
        """Serve NOT_SERVING until told otherwise."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self._publish()
        self._task = asyncio.create_task(self._run())

    def set(self, *, is_serving: bool, readiness: Readiness) -> None:
        """Publish without waiting: a watcher that does not read must not hold up the server."""
        state = (is_serving, readiness)
        if state != self._state:
            self._state = state
            self._changed.set()

    async def stop(self) -> None:
        """Publish no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._publish()

    async def _publish(self) -> None:
        status = health_pb2.HealthCheckResponse
        is_serving, readiness = self._state
        for name, needed in NAMES.items():
            await self._servicer.set(name, status.SERVING if is_serving and readiness >= needed else status.NOT_SERVING)
