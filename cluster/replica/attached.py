"""The routers that are attached to a replica: how many there are, which it leaves, and what they tell each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Protocol

from cluster.expiring_set import ExpiringSet

FINGERPRINT_BYTES = 16
MAX_VERDICTS = 256
MAX_VERDICT_S = 3600.0


class RouterSession(Protocol):
    """One router's stream."""

    @property
    def router(self) -> str:
        """The router's name; "" until it has said it."""

    def dismiss(self) -> None:
        """Take nothing new from it, and end once nothing of it runs."""

    def readmit(self) -> None:
        """It is one of ours after all."""

    def tell(self, verdicts: Mapping[bytes, float]) -> None:
        """Fingerprints of requests that end replicas, and for how many seconds each is to be refused."""


class AttachedRouters:
    """A router that is left finds the replica draining, each time it attaches, until it is one of ours again.

    Verdicts on requests travel from each router to the others through here: fingerprints alone, the newest MAX_VERDICTS.
    """

    def __init__(self) -> None:
        self._sessions: set[RouterSession] = set()
        self._dismissed: set[str] = set()
        self._verdicts = ExpiringSet(MAX_VERDICTS)

    @property
    def count(self) -> int:
        """Routers that send requests here, by name; one that has not said its name is one more."""
        names = [session.router for session in self._sessions]
        return len({name for name in names if name} - self._dismissed) + names.count("")

    def add(self, session: RouterSession) -> None:
        """A stream begins."""
        self._sessions.add(session)
        verdicts = self._verdicts.left()
        if verdicts:
            session.tell(verdicts)

    def discard(self, session: RouterSession) -> None:
        """It has ended."""
        self._sessions.discard(session)

    def note_name(self, session: RouterSession) -> None:
        """The router has said its name."""
        if session.router in self._dismissed:
            session.dismiss()

    def dismiss(self, names: Collection[str]) -> None:
        """Leave these routers: what they run here is finished, nothing new is taken."""
        self._dismissed.update(names)
        for session in self._sessions:
            if session.router in names:
                session.dismiss()

    def readmit(self, name: str) -> None:
        """Take requests of this router, as of one that was never left."""
        if name in self._dismissed:
            self._dismissed.discard(name)
            for session in self._sessions:
                if session.router == name:
                    session.readmit()

    def note_verdict(self, source: RouterSession | None, fingerprint: bytes, ttl_s: float) -> None:
        """Pass it on, unless it is known; what cannot be a verdict is ignored."""
        if len(fingerprint) != FINGERPRINT_BYTES or not 0 < ttl_s < math.inf or fingerprint in self._verdicts:
            return
        self._verdicts.add(fingerprint, min(ttl_s, MAX_VERDICT_S))
        for session in self._sessions - {source}:
            session.tell({fingerprint: min(ttl_s, MAX_VERDICT_S)})
