"""The servers a client may call: one, or several that stand in for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.config import check_address
from protos import control_pb2_grpc, generation_pb2_grpc


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """One server. Channel and stubs are those of `grpc` or of `grpc.aio`."""

    address: str
    channel: Any
    generation: Any
    control: Any


class Endpoints:
    """Calls go to the current one until it fails somebody; then the next one is current, for all calls."""

    def __init__(self, addresses: Sequence[str], open_channel: Callable[[str], Any]) -> None:
        self.all = tuple(_open(address, open_channel) for address in addresses)
        self._index = 0

    @property
    def current(self) -> Endpoint:
        """Where calls go."""
        return self.all[self._index]

    def leave(self, failed: Endpoint) -> Endpoint:
        """Go on from a server that failed a call, if that was not done already; returns the current one."""
        if self.current is failed:
            self._index = (self._index + 1) % len(self.all)
        return self.current


def addresses_of(target: str, targets: Sequence[str]) -> tuple[str, ...]:
    """Every host:port of a comma-separated list and a sequence, once. Raises ValueError for none."""
    given = [address.strip() for address in (*target.split(","), *targets)]
    addresses = tuple(dict.fromkeys(address for address in given if address))
    if not addresses:
        raise ValueError("no address to call is given")
    return addresses


def check_addresses(name: str, value: str) -> None:
    """Refuse a list of addresses of which one cannot be dialed."""
    for address in value.split(","):
        check_address(name, address.strip())


def _open(address: str, open_channel: Callable[[str], Any]) -> Endpoint:
    channel = open_channel(address)
    return Endpoint(
        address,
        channel,
        generation_pb2_grpc.GenerationServiceStub(channel),
        control_pb2_grpc.ControlServiceStub(channel),
    )
