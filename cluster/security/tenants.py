"""The file of tenants: who they are, what they may do, and the hashes of their tokens."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.security.caller import TENANT_ROLES, Caller, Role
from cluster.security.private_file import write_private
from cluster.security.quota import Quota
from cluster.security.tokens import Credential, create_token, credential_of, digest, token_id

MAX_FILE_BYTES = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEYS = {"roles", "tokens", "tokens_per_s", "burst_tokens", "max_streams", "weight"}
_NOBODY = Credential("00000000", digest(secrets.token_hex(32)))
"""Compared with when no token has the id that is shown, so that this takes as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant as the file tells it."""

    name: str
    roles: frozenset[Role] = frozenset({Role.USER})
    credentials: tuple[Credential, ...] = ()
    quota: Quota = field(default_factory=Quota)
    weight: float = 1.0
    """Its share of a pool that is full, against that of others."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"tenant {self.name!r:.80} must be 1 to 64 letters, digits, dots, dashes and underscores")
        if not self.roles:
            raise ValueError(f"tenant {self.name} has no roles")
        if not 0.01 <= self.weight <= 100:
            raise ValueError(f"weight {self.weight} of tenant {self.name} is outside [0.01, 100]")


class Tenants:
    """All tenants, found by token."""

    def __init__(self, tenants: Iterator[Tenant] | tuple[Tenant, ...]) -> None:
        self.by_name = {tenant.name: tenant for tenant in tenants}
        self._by_id: dict[str, tuple[Credential, Tenant]] = {}
        for tenant in self.by_name.values():
            for credential in tenant.credentials:
                if credential.id in self._by_id:
                    raise ValueError(f"two tokens have the id {credential.id}")
                self._by_id[credential.id] = (credential, tenant)

    def caller(self, token: str) -> Caller | None:
        """Whose token it is; None if nobody's."""
        credential, tenant = self._by_id.get(token_id(token) or "", (_NOBODY, None))
        is_right = credential.matches(token)
        return Caller(tenant.name, tenant.roles) if is_right and tenant is not None else None


def read_tenants(path: str) -> Tenants:
    """Raises OSError, or ValueError naming what is wrong; no message quotes a hash."""
    return Tenants(tuple(_tenant(name, entry) for name, entry in _entries(Path(path)).items()))


def add_token(
    path: Path, tenant: str, *, roles: tuple[Role, ...] = (), limits: Mapping[str, float] | None = None
) -> str:
    """A new token for a tenant, who is made if need be; only its hash is written. Roles and limits replace the old."""
    token = create_token()
    with _edited(path) as entries:
        entry = entries.setdefault(tenant, {})
        if roles or "roles" not in entry:
            entry["roles"] = [role.value for role in roles or (Role.USER,)]
        entry.update(limits or {})
        credential = credential_of(token)
        entry.setdefault("tokens", []).append({"id": credential.id, "sha256": credential.sha256})
    return token


def revoke_token(path: Path, id: str) -> str:  # noqa: A002  # it is what the file calls it
    """Take a token away; returns whose it was. Raises ValueError for an id that no token has."""
    with _edited(path) as entries:
        for name, entry in entries.items():
            kept = [token for token in entry.get("tokens", []) if token.get("id") != id]
            if len(kept) != len(entry.get("tokens", [])):
                entry["tokens"] = kept
                return name
        raise ValueError(f"no token has the id {id!r:.40}")


@contextlib.contextmanager
def _edited(path: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """The file's tenants, to be changed; written whole, checked, and only if nothing was raised."""
    with _locked(path):
        entries = _entries(path) if path.exists() else {}
        yield entries
        Tenants(tuple(_tenant(name, entry) for name, entry in entries.items()))
        write_private(path, yaml.safe_dump({"tenants": entries}, sort_keys=False))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML") from error
    tenants = content.get("tenants") if isinstance(content, dict) and content.keys() == {"tenants"} else None
    if not isinstance(tenants, dict) or not all(isinstance(name, str) for name in tenants):
        raise ValueError(f"{path} must hold `tenants:` and names under it")
    return {name: entry or {} for name, entry in tenants.items()}


def _tenant(name: str, entry: Any) -> Tenant:
    if not isinstance(entry, dict):
        raise ValueError(f"tenant {name!r:.80} must be a mapping")
    unknown = sorted(map(str, entry.keys() - _KEYS))
    if unknown:
        raise ValueError(f"tenant {name} has {', '.join(unknown)}; known are {', '.join(sorted(_KEYS))}")
    quota = {key: _number(name, key, entry[key]) for key in ("tokens_per_s", "burst_tokens") if key in entry}
    return Tenant(
        name=name,
        roles=frozenset(_role(name, role) for role in entry.get("roles", ["user"])),
        credentials=tuple(_credential(name, token) for token in entry.get("tokens") or ()),
        quota=Quota(**quota, max_streams=int(_number(name, "max_streams", entry.get("max_streams", 0)))),
        weight=_number(name, "weight", entry.get("weight", 1.0)),
    )


def _role(tenant: str, value: Any) -> Role:
    if value not in TENANT_ROLES:
        raise ValueError(f"role {value!r:.40} of tenant {tenant} is not one of {', '.join(TENANT_ROLES)}")
    return Role(value)


def _credential(tenant: str, entry: Any) -> Credential:
    if not isinstance(entry, dict) or entry.keys() != {"id", "sha256"}:
        raise ValueError(f"a token of tenant {tenant} must have id and sha256 and nothing else")
    return Credential(str(entry["id"]), str(entry["sha256"]))


def _number(tenant: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} of tenant {tenant} is not a number")
    return float(value)
