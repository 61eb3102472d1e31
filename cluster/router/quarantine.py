"""Requests that are known to end the worker that computes them."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Mapping

from cluster.codec import AnyRequest
from cluster.errors import PoisonedRequest
from cluster.expiring_set import ExpiringSet

MAX_ENTRIES = 1024
FINGERPRINT_BYTES = 16


class Quarantine:
    """Remembers what requests were like, not what they said: the newest MAX_ENTRIES, each for `ttl_s`.

    `secret` keys the fingerprints: the same for all routers of a pool, which learn from each other. `on_verdict` is told
    the fingerprint and the time of each request that was proven guilty here.
    """

    def __init__(
        self,
        ttl_s: float,
        *,
        secret: Callable[[], str] = lambda: "",
        on_verdict: Callable[[Mapping[bytes, float]], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s = ttl_s
        self._secret = secret
        self._on_verdict = on_verdict
        self._entries = ExpiringSet(MAX_ENTRIES, clock=clock)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def verdicts(self) -> Mapping[bytes, float]:
        """Fingerprints of what is refused, and for how many seconds more."""
        return self._entries.left()

    def add(self, request: AnyRequest) -> None:
        """Refuse requests like this one for a while."""
        key = fingerprint(request, self._secret())
        self._entries.add(key, self._ttl_s)
        self._on_verdict({key: self._ttl_s})

    def learn(self, key: bytes, ttl_s: float) -> None:
        """Refuse what another router found guilty, for as long as it does and no longer than this one would.

        What is known already keeps its own time: news that comes around again makes nothing last longer.
        """
        ttl_s = min(ttl_s, self._ttl_s)
        if len(key) == FINGERPRINT_BYTES and ttl_s > 0 and key not in self._entries:
            self._entries.add(key, ttl_s)

    def check(self, request: AnyRequest) -> None:
        """Raise PoisonedRequest for a request like one that is held here."""
        if len(self._entries) and fingerprint(request, self._secret()) in self._entries:
            raise PoisonedRequest


def fingerprint(request: AnyRequest, secret: str = "") -> bytes:
    """Equal for requests of one model, prompt and sampling; with a secret, of no use to anybody without it.

    Ids differ with each try, a seed that was drawn does too, and where cached blocks come from changes nothing.
    """
    bare = copy.deepcopy(request)
    for field in ("request_id", "use_prefix_cache", "cache_salt"):
        bare.ClearField(field)
    bare.sampling.ClearField("seed")
    kind = request.DESCRIPTOR.name.encode()[:16]
    key = hashlib.blake2b(secret.encode()).digest() if secret else b""
    text = bare.SerializeToString(deterministic=True)
    return hashlib.blake2b(text, digest_size=FINGERPRINT_BYTES, key=key, person=kind).digest()
