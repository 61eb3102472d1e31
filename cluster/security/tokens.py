"""Tokens: what a client keeps, and what a server keeps of it."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

ID_BYTES, SECRET_BYTES = 4, 32
AUTHORIZATION = "authorization"
_TOKEN = re.compile(rf"gp_([0-9a-f]{{{2 * ID_BYTES}}})_[A-Za-z0-9_-]{{20,128}}")
_BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Credential:
    """What is kept of a token: an id that is no secret, and a hash.

    A plain SHA-256 is enough: a token has 256 random bits, so there is nothing to guess through a slow hash.
    """

    id: str
    sha256: str = field(repr=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(rf"[0-9a-f]{{{2 * ID_BYTES}}}", self.id):
            raise ValueError(f"id {self.id!r:.40} is not {2 * ID_BYTES} hexadecimal digits")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError(f"sha256 of token {self.id} is not 64 hexadecimal digits")

    def matches(self, token: str) -> bool:
        """Whether it is this token; takes the same time for any other."""
        return secrets.compare_digest(self.sha256, digest(token))


def create_token() -> str:
    """A new one, to be shown once."""
    return f"gp_{secrets.token_hex(ID_BYTES)}_{secrets.token_urlsafe(SECRET_BYTES)}"


def credential_of(token: str) -> Credential:
    """What to keep of it. Raises ValueError for what is no token."""
    found = _TOKEN.fullmatch(token)
    if found is None:
        raise ValueError("this is not a token: one looks like gp_<id>_<secret>")
    return Credential(found[1], digest(token))


def token_id(token: str) -> str | None:
    """The id in a token; None for what is no token."""
    found = _TOKEN.fullmatch(token)
    return None if found is None else found[1]


def digest(token: str) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def bearer(metadata: Sequence[tuple[str, str | bytes]] | None) -> str:
    """The token in a call's metadata; "" when there is none."""
    for key, value in metadata or ():
        if key == AUTHORIZATION and isinstance(value, str) and value[: len(_BEARER)].lower() == _BEARER:
            return value[len(_BEARER) :].strip()
    return ""


def bearer_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """How a token travels."""
    return ((AUTHORIZATION, f"Bearer {token}"),) if token else ()
