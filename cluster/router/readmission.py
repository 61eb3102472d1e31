"""Canaries until one comes back: how a replica gets requests, and gets them again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from cluster.criticality import use_criticality
from cluster.errors import CanaryFailed
from cluster.router.breaker import BreakerState
from cluster.router.vitals import Vitals
from worker.request import Criticality

LOOK_AGAIN_S = 0.5
"""While a replica sits out the pause of its place: the last one that takes requests may be gone meanwhile."""

log = logging.getLogger(__name__)


class Readmitted(Protocol):
    """A replica that is attached."""

    name: str
    incarnation: str
    vitals: Vitals


class Readmission:
    """One run at a time: each canary after the pauses of the place and of the breaker, until the breaker is closed."""

    def __init__(
        self, replica: Readmitted, probe: Callable[[], Awaitable[None]], on_change: Callable[[], None]
    ) -> None:
        self._replica = replica
        self._probe = probe
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """A canary is due."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        """The replica is gone."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        use_criticality(Criticality.CRITICAL_PLUS)  # nobody is served until it has passed
        replica, breaker = self._replica, self._replica.vitals.breaker
        if not breaker.is_closed:
            await self._sit_out()
        while not breaker.is_closed:
            await asyncio.sleep(breaker.pause_left_s)
            breaker.probing()
            try:
                await self._probe()
            except CanaryFailed as error:
                log.warning("%s, on %s", error, replica.vitals.place)
                if breaker.state is BreakerState.HALF_OPEN:
                    breaker.refused()
            else:
                breaker.passed()
                log.info("replica %s (%s) is ready", replica.name, replica.incarnation)
            self._on_change()

    async def _sit_out(self) -> None:
        """Whatever ran in its place before kept ending: as long as others take the requests, this one may wait."""
        vitals = self._replica.vitals
        pause_s = vitals.place_pause_s
        if pause_s > 0:
            vitals.breaker.hold()
            log.warning(
                "replica %s (%s) gets no canary for %.1f s: on %s %d processes in a row ended badly, the last because %s; "
                "if that goes on, take that GPU out of service (docs/operations.md, A place that keeps failing)",
                *(self._replica.name, self._replica.incarnation, pause_s),
                *(vitals.place, vitals.num_ends, vitals.last_end),
            )
            self._on_change()
        while (pause_s := vitals.place_pause_s) > 0:  # noqa: ASYNC110  # what it waits for has no event
            await asyncio.sleep(min(pause_s, LOOK_AGAIN_S))
