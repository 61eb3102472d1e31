"""Requests that are known to end the worker that computes them."""

from __future__ import annotations

import copy
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

from cluster.codec import AnyRequest
from cluster.errors import PoisonedRequest

MAX_ENTRIES = 1024


class Quarantine:
    """Remembers what requests were like, not what they said: the newest MAX_ENTRIES, each for `ttl_s`."""

    def __init__(self, ttl_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, request: AnyRequest) -> None:
        """Refuse requests like this one for a while."""
        key = fingerprint(request)
        self._until_s[key] = self._clock() + self._ttl_s
        self._until_s.move_to_end(key)
        if len(self._until_s) > MAX_ENTRIES:
            self._until_s.popitem(last=False)

    def check(self, request: AnyRequest) -> None:
        """Raise PoisonedRequest for a request like one that is held here."""
        if not self._until_s:
            return
        key = fingerprint(request)
        until_s = self._until_s.get(key)
        if until_s is None:
            return
        if self._clock() < until_s:
            raise PoisonedRequest
        del self._until_s[key]


def fingerprint(request: AnyRequest) -> bytes:
    """Equal for requests of one model, prompt and sampling.

    Ids differ with each try, a seed that was drawn does too, and where cached blocks come from changes nothing.
    """
    bare = copy.deepcopy(request)
    for field in ("request_id", "use_prefix_cache", "cache_salt"):
        bare.ClearField(field)
    bare.sampling.ClearField("seed")
    kind = request.DESCRIPTOR.name.encode()
    return hashlib.blake2b(bare.SerializeToString(deterministic=True), digest_size=16, person=kind[:16]).digest()
