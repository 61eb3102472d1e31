"""What the streams and the membership of a router need of a link."""

from __future__ import annotations


class FakeLink:
    """Records what is done to it."""

    def __init__(self, address: str = "127.0.0.1:1", incarnation: str = "") -> None:
        self.name = "replica"
        self.address = address
        self.incarnation = incarnation
        self.outstanding_tokens = 0
        self.num_streams = 0
        self.is_attached = True
        self.calls: list[str] = []
        self.forgotten: list[tuple[int, bool]] = []

    def forget(self, stream_id: int, *, cancel: bool) -> None:
        self.forgotten.append((stream_id, cancel))

    def start(self) -> None:
        self.calls.append("start")

    def poke(self) -> None:
        self.calls.append("poke")

    def retire(self) -> None:
        self.calls.append("retire")

    async def stop(self) -> None:
        self.calls.append("stop")
