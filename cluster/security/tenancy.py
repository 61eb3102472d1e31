"""What belongs to a tenant while its requests are answered: quota, turn, cached prefixes and the right to end them."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from prometheus_client.core import Metric

from cluster import codec
from cluster.codec import AnyRequest
from cluster.errors import NotPermitted, QuotaExceeded
from cluster.metrics.families import counter, gauge, plain_gauge
from cluster.security.caller import Role, current_caller
from cluster.security.guard import Guard
from cluster.security.quota import Account, Quota
from protos import generation_pb2
from worker.request import Criticality

GUESSED_ANSWER_TOKENS = 256
"""Taken for a request that sets no max_tokens, until its answer is there."""

Pieces = AsyncGenerator[generation_pb2.GenerateResponse, None]


class Gate(Protocol):
    """Where requests wait while the pool is full."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""

    def turn(
        self, tenant: str, *, cost: float, rows: int, weight: float, timeout_s: float | None
    ) -> AbstractAsyncContextManager[None]:
        """Hold `rows` of the pool for the block."""


class Spending:
    """What one request was taken to cost, and what it came to."""

    __slots__ = ("estimate", "num_tokens", "prompt_tokens", "waited_s")

    def __init__(self, estimate: int) -> None:
        self.estimate = estimate
        self.waited_s = 0.0
        """Until its turn came; the router's own times begin there."""
        self.prompt_tokens = 0
        self.num_tokens = 0

    @property
    def used(self) -> int:
        """Tokens so far."""
        return self.prompt_tokens + self.num_tokens

    async def counted(self, pieces: Pieces) -> Pieces:
        """The same pieces, counted as they pass; the wait for the turn is part of their times."""
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                self.prompt_tokens = max(self.prompt_tokens, piece.usage.prompt_tokens)
                for choice in piece.choices:
                    self.num_tokens += len(choice.token_ids)
                if piece.HasField("timings"):
                    piece.timings.router_ms += 1000 * self.waited_s
                    piece.timings.total_ms += 1000 * self.waited_s
                yield piece


class Tenancy:
    """Of one server. Without a file of tenants there is nothing to hold anybody to."""

    def __init__(
        self,
        guard: Guard,
        gate: Gate | None = None,
        *,
        num_sharing: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_sharing` is the number of servers that give out a quota together, this one included."""
        self._num_sharing = num_sharing
        self._guard = guard
        self._gate = gate
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._owners: dict[str, str] = {}
        self._tokens: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    @property
    def has_tenant(self) -> bool:
        """Whether the present caller is a tenant, who is held to a quota and a turn."""
        return bool(current_caller().tenant)

    def prepare(self, request: AnyRequest) -> None:
        """Bind a checked request to its tenant: what it leaves in a prefix cache, only this tenant finds again."""
        tenant = current_caller().tenant
        if tenant:
            request.cache_salt = tenant_salt(tenant, request.cache_salt)

    def check_criticality(self, criticality: Criticality) -> None:
        """Raises NotPermitted for a rank that would put a tenant's work before the pool's own."""
        if criticality is Criticality.CRITICAL_PLUS and not current_caller().is_any(Role.OPERATOR, Role.ROUTER):
            raise NotPermitted("criticality: critical-plus is for operators")

    @contextlib.asynccontextmanager
    async def turn(self, request: AnyRequest, *, timeout_s: float | None) -> AsyncIterator[Spending]:
        """For as long as a request of a tenant is answered. Raises QuotaExceeded, or DeadlineExceeded while it waits."""
        name = current_caller().tenant
        spending = Spending(estimate(request))
        account, weight = self._account(name)
        with self._refusals_of(name):
            account.open(spending.estimate)
        self._owners[request.request_id] = name
        asked_s = self._clock()
        try:
            async with self._turn(name, spending, weight, request, timeout_s):
                spending.waited_s = self._clock() - asked_s
                yield spending
        finally:
            self._owners.pop(request.request_id, None)
            self._tokens[name] += spending.used
            account.close(spending.estimate, spending.used)

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """For a call that takes no tokens of the pool: one of the tenant's requests at the same time, nothing more."""
        name = current_caller().tenant
        if not name:
            yield
            return
        account, _ = self._account(name)
        with self._refusals_of(name):
            account.open(0)
        try:
            yield
        finally:
            account.close(0, 0)

    def may_abort(self, request_id: str) -> bool:
        """Operators and the pool may end any request, tenants their own alone."""
        caller = current_caller()
        return caller.is_any(Role.OPERATOR, Role.ROUTER) or self._owners.get(request_id) == caller.tenant

    def families(self) -> Iterator[Metric]:
        """For a scrape. Tenants' names are the file's, not a client's."""
        tokens = (((name,), count) for name, count in self._tokens.items())
        refused = (((name,), count) for name, count in self._refused.items())
        streams = (((name,), account.num_streams) for name, account in self._accounts.items())
        calls = (((code.lower(),), count) for code, count in self._guard.refused.items())
        yield counter("tenant_tokens", "Tokens of prompts and answers, by tenant.", tokens, ("tenant",))
        yield counter("tenant_refused_requests", "Requests over their tenant's quota.", refused, ("tenant",))
        yield gauge("tenant_streams", "Requests being answered or waiting for their turn.", streams, ("tenant",))
        yield counter("refused_calls", "Calls of callers who are not known or not allowed.", calls, ("code",))
        yield plain_gauge("quota_routers", "Routers that give out each quota together.", self._num_sharing())
        num_waiting = 0 if self._gate is None else self._gate.num_waiting
        yield plain_gauge("waiting_turns", "Requests that wait for their tenant's turn.", num_waiting)

    @contextlib.contextmanager
    def _refusals_of(self, name: str) -> Iterator[None]:
        try:
            yield
        except QuotaExceeded:
            self._refused[name] += 1
            raise

    def _turn(
        self, name: str, spending: Spending, weight: float, request: AnyRequest, timeout_s: float | None
    ) -> AbstractAsyncContextManager[None]:
        if self._gate is None:
            return contextlib.nullcontext()
        rows = max(1, request.sampling.n)
        return self._gate.turn(name, cost=spending.estimate, rows=rows, weight=weight, timeout_s=timeout_s)

    def _account(self, name: str) -> tuple[Account, float]:
        tenant = self._guard.tenant(name)
        quota, weight = (tenant.quota, tenant.weight) if tenant is not None else (Quota(), 1.0)
        part = quota.part_of(self._num_sharing())
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(name, part, clock=self._clock)
        account.change(part)
        return account, weight


def tenant_salt(tenant: str, salt: str) -> str:
    """A prefix cache's salt that no other tenant can bring about, whatever it sends; 64 bytes."""
    return hashlib.sha256(f"{len(tenant)}:{tenant}:{salt}".encode("utf-8", "surrogatepass")).hexdigest()


def estimate(request: AnyRequest) -> int:
    """Tokens the request takes to cost, of its prompt and all its answers."""
    sampling = request.sampling
    answer = sampling.max_tokens if sampling.HasField("max_tokens") else GUESSED_ANSWER_TOKENS
    return codec.prompt_estimate(request) + answer * max(1, sampling.n)
