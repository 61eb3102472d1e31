"""HTTP/2 by hand, for what no client library would send."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4


@dataclass(frozen=True, slots=True)
class Frame:
    """One received frame."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header without Huffman coding and outside every table."""
    return b"\x00" + _string(name) + _string(value)


def grpc_headers(path: str, **more: str) -> bytes:
    pairs = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
        **more,
    }
    return b"".join(literal(name, value) for name, value in pairs.items())


def message(raw: bytes, *, is_compressed: bool = False) -> bytes:
    """A gRPC message."""
    return bytes([is_compressed]) + struct.pack(">I", len(raw)) + raw


class RawConnection:
    """One TCP connection that speaks frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, address: str, *, preface: bool = True) -> RawConnection:
        host, port = address.rsplit(":", 1)
        connection = cls(*await asyncio.open_connection(host, int(port)))
        if preface:
            connection.writer.write(PREFACE + frame(SETTINGS, 0, 0))
            await connection.writer.drain()
        return connection

    async def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))
        await self.writer.drain()

    async def read(self, timeout_s: float = 5.0) -> Frame | None:
        """The next frame; None when the server has hung up."""
        try:
            async with asyncio.timeout(timeout_s):
                head = await self.reader.readexactly(9)
                length = int.from_bytes(head[:3])
                return Frame(head[3], head[4], int.from_bytes(head[5:9]), await self.reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def closed_within(self, timeout_s: float) -> bool:
        """Whether the server hangs up in that time."""
        try:
            async with asyncio.timeout(timeout_s):
                while await self.read(timeout_s) is not None:
                    pass
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        self.writer.close()


def _string(text: str) -> bytes:
    raw = text.encode()
    length = len(raw)
    if length < 127:
        return bytes([length]) + raw
    coded, rest = bytearray([127]), length - 127
    while rest >= 128:
        coded.append(rest % 128 + 128)
        rest //= 128
    coded.append(rest)
    return bytes(coded) + raw
