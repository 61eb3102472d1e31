"""grpc.health.v1 for a server that is ready or not."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]  # the stub lacks it

from cluster.generation import SERVICE as GENERATION_SERVICE

SERVICE = SERVICE_NAME
NAMES = ("", GENERATION_SERVICE)


class Health:
    """Publishes one bit, under the server's name and that of the generation service; watchers see it change."""

    def __init__(self) -> None:
        self._servicer = health_aio.HealthServicer()
        self._changed = asyncio.Event()
        self._is_serving = False
        self._task: asyncio.Task[None] | None = None

    async def start(self, server: grpc.aio.Server) -> None:
        """Serve NOT_SERVING until told otherwise."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self._publish()
        self._task = asyncio.create_task(self._run())

    def set_serving(self, is_serving: bool) -> None:
        """Publish without waiting: a watcher that does not read must not hold up the server."""
        if is_serving != self._is_serving:
            self._is_serving = is_serving
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
        for name in NAMES:
            await self._servicer.set(name, status.SERVING if self._is_serving else status.NOT_SERVING)
