"""One Attach stream to one replica, from dialing to its loss."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import grpc

from cluster.config import RouterConfig
from cluster.security.config import REPLICA_NAME
from cluster.status import status_of
from cluster.transport import open_link_channel
from protos import replica_pb2, replica_pb2_grpc

WATCH_PERIOD_S = 0.25

AttachCall: TypeAlias = "grpc.aio.StreamStreamCall[replica_pb2.RouterFrame, replica_pb2.ReplicaFrame]"


class Connection:
    """Dials, sends frames in order and hands received ones on. Used once: a new try is a new object."""

    def __init__(
        self, address: str, config: RouterConfig, on_frame: Callable[[replica_pb2.ReplicaFrame], None]
    ) -> None:
        self.channel = open_link_channel(address, config.keepalive, config.security, peer=REPLICA_NAME)
        self.is_silent = False
        """Whether it was given up because nothing came any more, or went."""
        self._config = config
        self._on_frame = on_frame
        self._outgoing: asyncio.Queue[replica_pb2.RouterFrame] = asyncio.Queue()
        self._quiet_s: float | None = None
        self._unheard_s = 0.0
        self._num_sent = 0
        self._num_heard = 0
        self._closing = asyncio.Event()

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def send(self, frame: replica_pb2.RouterFrame) -> None:
        """Send after whatever was sent before."""
        self._outgoing.put_nowait(frame)

    def close(self) -> None:
        """Make `run` return."""
        self._closing.set()

    async def run(self) -> str:
        """Serve until the replica is lost or `close` is called; returns why it ended."""
        try:
            call = replica_pb2_grpc.ReplicaServiceStub(self.channel).Attach()  # type: ignore[call-arg]  # the stub wants an iterator
            work = (self._read(call), self._write(call), self._watch(), self._closing.wait())
            tasks = [asyncio.create_task(part) for part in work]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                call.cancel()
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
            return await self._reason(call, results)
        finally:
            await self.channel.close(None)

    async def _read(self, call: AttachCall) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with asyncio.timeout(self._config.connect_timeout_s):
                frame = await call.read()
            while isinstance(frame, replica_pb2.ReplicaFrame):
                self._note(frame)
                self._on_frame(frame)
                frame = await call.read()

    async def _write(self, call: AttachCall) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                frame = await self._outgoing.get()
                self._num_sent += 1
                await call.write(frame)

    def _note(self, frame: replica_pb2.ReplicaFrame) -> None:
        self._quiet_s = 0.0
        if frame.frames_heard > self._num_heard:
            self._num_heard = frame.frames_heard
            self._unheard_s = 0.0

    async def _watch(self) -> None:
        """Ends when nothing was heard for too long, or when the replica has heard nothing of what it was sent.

        Of a tick that is late only one period counts: a router that was held up itself has not listened meanwhile, and
        what has come since is still to be read.
        """
        while True:
            started_s = time.monotonic()
            await asyncio.sleep(WATCH_PERIOD_S)
            if self._quiet_s is None:
                continue
            passed_s = min(time.monotonic() - started_s, 2 * WATCH_PERIOD_S)
            self._quiet_s += passed_s
            self._unheard_s = self._unheard_s + passed_s if 0 < self._num_heard < self._num_sent else 0.0
            if max(self._quiet_s, self._unheard_s) > self._config.silence_timeout_s:
                self.is_silent = True
                return

    async def _reason(self, call: AttachCall, results: Sequence[BaseException | bool | None]) -> str:
        if self.is_silent:
            side = "by it" if self._unheard_s > self._config.silence_timeout_s else "of it"
            return f"nothing was heard {side} for {self._config.silence_timeout_s:.1f} s"
        if self._closing.is_set():
            return "closed"
        for result in results:
            if isinstance(result, TimeoutError):
                return f"no first frame in {self._config.connect_timeout_s:.1f} s"
            if isinstance(result, Exception):
                return f"{status_of(result).details} in the router"
        with contextlib.suppress(asyncio.CancelledError):
            return f"{(await call.code()).name}: {await call.details()}"
        return "cancelled"
