"""What the client that blocks and the one for asyncio have in common: everything but the waiting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from cluster.client.answers import Answer, answer_of
from cluster.client.criticality import with_criticality
from cluster.client.endpoints import Endpoint, Endpoints, addresses_of
from cluster.client.errors import call_error
from cluster.client.failover import Failover, Progress, Response
from cluster.client.requests import check_timeout
from cluster.config import ClientConfig
from cluster.transport import Options, client_options


class BaseClient(ABC):
    """The servers, and how long and how often a call is tried on them."""

    def __init__(
        self,
        target: str = "",
        config: ClientConfig | None = None,
        *,
        targets: Sequence[str] = (),
        token: str | None = None,
    ) -> None:
        self._config = config or ClientConfig()
        addresses = addresses_of(target, targets)
        options = client_options(self._config, is_alone=len(addresses) == 1)
        self._endpoints = Endpoints(
            addresses, lambda address: with_criticality(self._open_channel(address, options, token), self._config)
        )

    @abstractmethod
    def _open_channel(self, address: str, options: Options, token: str | None) -> Any:
        """A channel of `grpc` or of `grpc.aio`."""

    def _failover(self, timeout_s: float | None) -> Failover:
        return Failover(len(self._endpoints.all), self._config, self._timeout(timeout_s))

    def _timeout(self, timeout_s: float | None) -> float | None:
        return self._config.timeout_s if timeout_s is None else check_timeout(timeout_s)

    def _leave(self, endpoint: Endpoint, failover: Failover, error: Any) -> tuple[Endpoint, float]:
        """Which server to call after a failure, and after how long. Raises CallError when there is none."""
        pause_s = failover.pause_s(error.code())
        if pause_s is None:
            raise call_error(error) from error
        return self._endpoints.leave(endpoint), pause_s


class BaseAnswerStream:
    """The call under way of one answer, and where the rest is asked for when it breaks off."""

    def __init__(self, endpoints: Endpoints, progress: Progress, failover: Failover) -> None:
        self._endpoints = endpoints
        self._progress = progress
        self._failover = failover
        self._endpoint = endpoints.current
        self._is_cancelled = False
        self._call_endpoint()

    def cancel(self) -> None:
        """End the request; the server frees what it holds."""
        self._is_cancelled = True
        self._call.cancel()

    def _call_endpoint(self) -> None:
        self._call = self._progress.call(self._endpoint, self._failover.timeout_s)

    def _take(self, response: Response) -> Answer:
        self._progress.note(response)
        self._failover.note_progress()
        return answer_of(response)

    def _leave(self, error: Any) -> float:
        """Turn to another server for the rest; returns the pause before it is called. Raises what ends the answer."""
        pause_s = self._failover.pause_s(error.code(), is_resuming=self._progress.has_begun)
        if pause_s is None or self._is_cancelled:
            raise call_error(error) from error
        self._endpoint = self._endpoints.leave(self._endpoint)
        return pause_s
