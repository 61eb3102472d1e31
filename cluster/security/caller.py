"""Who calls."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a caller is to the pool."""

    USER = "user"
    OPERATOR = "operator"
    MONITOR = "monitor"
    ROUTER = "router"
    REPLICA = "replica"


TENANT_ROLES = (Role.USER, Role.OPERATOR, Role.MONITOR)
"""Those a tenant of the tokens' file can have."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One authenticated caller; "" as tenant = the pool itself, or anybody on a server that asks nobody."""

    tenant: str
    roles: frozenset[Role]

    def is_any(self, *roles: Role) -> bool:
        """Whether it has one of these roles."""
        return not self.roles.isdisjoint(roles)


ANYBODY = Caller("", frozenset(Role))
"""On a server that does not ask who calls."""

_current: ContextVar[Caller] = ContextVar("graphpool_caller", default=ANYBODY)


def current_caller() -> Caller:
    """Of the call this task is answering."""
    return _current.get()


def set_caller(caller: Caller) -> None:
    """For the rest of this task."""
    _current.set(caller)
