"""What a server asks of its callers, and the interceptor that asks it on every method."""

from __future__ import annotations

import inspect
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn

import grpc

from cluster import status
from cluster.errors import NotPermitted, Unauthenticated
from cluster.handlers import Context, Handler, behaviour_of, with_behaviour
from cluster.security.access import roles_for
from cluster.security.caller import ANYBODY, Caller, Role, set_caller
from cluster.security.config import DOMAIN, SecurityConfig
from cluster.security.secret_file import read_secret
from cluster.security.tenants import Tenant, Tenants, read_tenants
from cluster.security.tls import ServerCertificates
from cluster.security.tokens import bearer
from cluster.security.watched_file import WatchedFiles

LOG_PERIOD_S = 1.0
POOL = Caller("", frozenset({Role.ROUTER, Role.REPLICA}))

Refusal = Unauthenticated | NotPermitted
Details = grpc.HandlerCallDetails

_CERT_ROLES = {f"{role.value}.{DOMAIN}": role for role in (Role.ROUTER, Role.REPLICA, Role.OPERATOR)}
_CERT_ROLES[f"client.{DOMAIN}"] = Role.USER

log = logging.getLogger(__name__)


class Guard:
    """Knows the callers of one server. Raises OSError or ValueError for files that cannot be used."""

    def __init__(self, config: SecurityConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.refused: Counter[str] = Counter()
        """Calls that were turned away, by the name of their status."""
        self.certificates = ServerCertificates(config, clock=clock) if config.has_tls else None
        self._tenants = (
            WatchedFiles([config.tokens], lambda: read_tenants(config.tokens), clock=clock) if config.tokens else None
        )
        self._secret = (
            WatchedFiles([config.pool_token], lambda: read_secret(config.pool_token), clock=clock)
            if config.pool_token
            else None
        )

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """None without TLS."""
        return None if self.certificates is None else self.certificates.credentials()

    @property
    def pool_token(self) -> str:
        """What this server shows others of the pool; "" without one."""
        return "" if self._secret is None else self._secret.get()

    @property
    def tenants(self) -> Tenants | None:
        """As the file has them now; None when no tokens are asked for."""
        return None if self._tenants is None else self._tenants.get()

    def tenant(self, name: str) -> Tenant | None:
        """A tenant of the file."""
        tenants = self.tenants
        return None if tenants is None else tenants.by_name.get(name)

    def caller_of_token(self, token: str) -> Caller:
        """Raises Unauthenticated for a token nobody has."""
        secret = self.pool_token
        if secret and secrets.compare_digest(secret.encode(), token.encode()):
            return POOL
        tenants = self.tenants
        caller = None if tenants is None else tenants.caller(token)
        if caller is None:
            raise Unauthenticated("this token is not known here")
        return caller

    def caller_of_certificate(self, context: Mapping[str, Any]) -> Caller:
        """By the names in a certificate that TLS has verified. With tokens, it speaks for routers and replicas alone."""
        names = [name.decode("ascii", "replace") for name in context.get("x509_subject_alternative_name", ())]
        roles = frozenset(_CERT_ROLES[name] for name in names if name in _CERT_ROLES)
        if self._tenants is not None:
            roles &= POOL.roles
        if not roles:
            raise Unauthenticated(_NO_TOKEN)
        is_tenant = not roles.isdisjoint((Role.USER, Role.OPERATOR))
        subject = next(iter(context.get("x509_common_name", ())), b"").decode("utf-8", "replace")
        return Caller(subject if is_tenant else "", roles)


class Authenticate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stub only
    """Lets through who may call the method, whatever it is, and tells the rest of the task who that is.

    Unknown callers get UNAUTHENTICATED even for methods that do not exist; nothing of their request is parsed.
    """

    def __init__(self, guard: Guard, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._guard = guard
        self._refusals = _RefusalLog(clock)

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler]], details: Details
    ) -> Handler:
        """The method's own handler, or one that refuses."""
        if not self._guard.config.asks_who:
            set_caller(ANYBODY)
            return await continuation(details)
        token = bearer(details.invocation_metadata)
        try:
            if not token:
                return await self._by_certificate(continuation, details)
            caller = self._guard.caller_of_token(token)
            _check(caller, details.method)
        except (Unauthenticated, NotPermitted) as error:
            return self._refusing(details.method, error)
        set_caller(caller)
        return await continuation(details)

    async def _by_certificate(self, continuation: Callable[[Details], Awaitable[Handler]], details: Details) -> Handler:
        """Who it is shows only once the method is called."""
        if not self._guard.config.wants_client_certs:
            raise Unauthenticated(_NO_TOKEN)
        handler = await continuation(details)
        if handler is None:
            raise Unauthenticated(_NO_TOKEN)
        return _wrapped(handler, lambda context: self._admit(details.method, context))

    async def _admit(self, method: str, context: Context) -> None:
        try:
            caller = self._guard.caller_of_certificate(context.auth_context())
            _check(caller, method)
        except (Unauthenticated, NotPermitted) as error:
            await self._turn_away(method, context, error)
        set_caller(caller)

    async def _turn_away(self, method: str, context: Context, error: Refusal) -> NoReturn:
        self._guard.refused[status.code_of(error).name] += 1
        self._refusals.note(method, context.peer(), error)
        await status.abort(context, error)

    def _refusing(self, method: str, error: Refusal) -> Handler:
        async def refuse(_: object, context: Context) -> None:
            await self._turn_away(method, context, error)

        return grpc.stream_stream_rpc_method_handler(refuse)


class _RefusalLog:
    """One line a second at most: who is refused must not fill the disk."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_s: float | None = None
        self._num_silent = 0

    def note(self, method: str, peer: str, error: Refusal) -> None:
        now_s = self._clock()
        if self._logged_s is not None and now_s - self._logged_s < LOG_PERIOD_S:
            self._num_silent += 1
            return
        more = f" ({self._num_silent} more since the last line)" if self._num_silent else ""
        self._logged_s, self._num_silent = now_s, 0
        log.warning("%.128r of %s is refused: %s%s", method, peer, error, more)


_NO_TOKEN = "this call needs a token: `authorization: Bearer ...` in its metadata"  # noqa: S105  # no secret


def _check(caller: Caller, method: str) -> None:
    roles = roles_for(method)
    if not caller.is_any(*roles):
        raise NotPermitted(f"this call needs one of the roles {', '.join(roles)}")


def _wrapped(handler: Any, admit: Callable[[Context], Awaitable[None]]) -> Handler:
    """The same method, behind `admit`."""
    behaviour = behaviour_of(handler)
    guard = _guarded_pieces if inspect.isasyncgenfunction(behaviour) else _guarded
    return with_behaviour(handler, guard(behaviour, admit))


def _guarded(behaviour: Any, admit: Callable[[Context], Awaitable[None]]) -> Any:
    async def answer(request: Any, context: Context) -> Any:
        await admit(context)
        return await behaviour(request, context)

    return answer


def _guarded_pieces(behaviour: Any, admit: Callable[[Context], Awaitable[None]]) -> Any:
    async def answer(request: Any, context: Context) -> Any:
        await admit(context)
        async for piece in behaviour(request, context):
            yield piece

    return answer
