"""What the streams and the membership of a router need of a link."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.router.vitals import Vitals
from protos import control_pb2


class FakeLink:
    """Records what is done to it."""

    def __init__(self, address: str = "127.0.0.1:1", incarnation: str = "") -> None:
        self.name = "replica"
        self.address = address
        self.incarnation = incarnation
        self.outstanding_tokens = 0
        self.num_streams = 0
        self.num_routers = 0
        self.told: list[Mapping[bytes, float]] = []
        self.is_attached = True
        self.is_ready = True
        self.model = control_pb2.ModelInfo(name="model")
        self.vitals = Vitals(pause_min_s=1.0, pause_max_s=1.0, may_open=lambda: True)
        self.calls: list[str] = []
        self.forgotten: list[tuple[int, bool]] = []

    def forget(self, stream_id: int, *, cancel: bool) -> None:
        self.forgotten.append((stream_id, cancel))

    def tell(self, verdicts: Mapping[bytes, float]) -> None:
        self.told.append(verdicts)

    def start(self) -> None:
        self.calls.append("start")

    def poke(self) -> None:
        self.calls.append("poke")

    def retire(self) -> None:
        self.calls.append("retire")

    async def stop(self) -> None:
        self.calls.append("stop")
