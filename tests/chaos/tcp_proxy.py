"""A TCP proxy that can lose, delay, throttle and break what passes through it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

CHUNK_BYTES = 16 * 1024
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of 0 seconds: closing sends RST."""


@dataclass(slots=True)
class Direction:
    """What happens to one direction; may be changed while bytes flow."""

    is_blackhole: bool = False
    """Bytes, and the end of the stream, vanish: neither side learns of it."""
    delay_s: float = 0.0
    """Every chunk arrives so much later, in order."""
    bytes_per_s: float = 0.0
    """0 = as fast as it goes."""


class TcpProxy:
    """Listens on loopback and connects each caller with `target`."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.to_target = Direction()
        self.from_target = Direction()
        self.address = ""
        self.is_refusing = False
        """New connections are accepted and never served: as of a peer that lost its state."""
        self._server: asyncio.Server | None = None
        self._pairs: dict[asyncio.StreamWriter, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_connections(self) -> int:
        """Pairs of connections that stand."""
        return len(self._pairs)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=CHUNK_BYTES)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self._close_all(reset=False)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def blackhole(self, *, to_target: bool = True, from_target: bool = True) -> None:
        """Everything sent that way vanishes from now on, on old connections and new ones."""
        self.to_target.is_blackhole, self.from_target.is_blackhole = to_target, from_target

    def heal(self) -> None:
        """Everything passes again; what vanished stays lost, so connections that lost bytes are reset."""
        was_lossy = self.to_target.is_blackhole or self.from_target.is_blackhole
        self.to_target, self.from_target = Direction(), Direction()
        self.is_refusing = False
        if was_lossy:
            self.reset()

    def delay(self, delay_s: float) -> None:
        """Of both directions."""
        self.to_target.delay_s = self.from_target.delay_s = delay_s

    def reset(self) -> None:
        """RST to both ends of every connection."""
        self._close_all(reset=True)

    def half_open(self) -> None:
        """The target's end is closed; the caller is not told, and nothing it sends is answered."""
        self.blackhole()
        self.is_refusing = True
        for target in self._pairs.values():
            target.close()

    async def _serve(self, reader: asyncio.StreamReader, caller: asyncio.StreamWriter) -> None:
        if self.is_refusing:
            self._pairs[caller] = caller
            await self._drop_all(reader)
            return
        try:
            target_reader, target = await asyncio.open_connection(*self._target, limit=CHUNK_BYTES)
        except OSError:
            _close(caller, reset=True)
            return
        self._pairs[caller] = target
        ways = (self._pump(reader, target, is_to_target=True), self._pump(target_reader, caller, is_to_target=False))
        tasks = [asyncio.create_task(way) for way in ways]
        self._tasks.update(tasks)
        await asyncio.wait(tasks)
        self._tasks.difference_update(tasks)
        self._pairs.pop(caller, None)
        _close(caller, reset=False)
        _close(target, reset=False)

    def _direction(self, is_to_target: bool) -> Direction:
        return self.to_target if is_to_target else self.from_target

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_to_target: bool) -> None:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)
        sender = asyncio.create_task(self._send(queue, writer, is_to_target))
        self._tasks.add(sender)
        sender.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while chunk := await reader.read(CHUNK_BYTES):
                way = self._direction(is_to_target)
                if not way.is_blackhole:
                    await queue.put((loop.time() + way.delay_s, chunk))
        # The end of a stream vanishes in a black hole like everything else.
        while self._direction(is_to_target).is_blackhole:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await queue.put((loop.time() + self._direction(is_to_target).delay_s, b""))
        await sender

    async def _send(
        self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, is_to_target: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while True:
                due_s, chunk = await queue.get()
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                way = self._direction(is_to_target)
                if not chunk:
                    writer.close()
                    return
                if way.is_blackhole:
                    continue
                if way.bytes_per_s:
                    await asyncio.sleep(len(chunk) / way.bytes_per_s)
                writer.write(chunk)
                await writer.drain()

    async def _drop_all(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(CHUNK_BYTES):
                pass

    def _close_all(self, *, reset: bool) -> None:
        for caller, target in tuple(self._pairs.items()):
            _close(caller, reset=reset)
            _close(target, reset=reset)
        self._pairs.clear()


def _close(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        if reset and sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    if reset:
        writer.transport.abort()
    else:
        writer.close()


@contextlib.asynccontextmanager
async def tcp_proxy(target: str) -> AsyncIterator[TcpProxy]:
    """One for the length of a block."""
    proxy = TcpProxy(target)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
