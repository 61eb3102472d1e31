"""What a check found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    status: Status
    """warn: something works less well than it could; fail: something that graphpool needs does not work."""
    detail: str
    remedy: str = ""
    """What to do; empty when all is well."""


Check = tuple[str, Callable[[], Finding]]
"""Name, and a function that may raise: an unexpected exception is a failed check, not the end of the report."""


def run_checks(checks: Iterable[Check]) -> Iterator[Finding]:
    """Run one after the other."""
    for name, check in checks:
        try:
            yield check()
        except Exception as error:  # noqa: BLE001 - a broken machine breaks in ways nobody has thought of
            text = (str(error).splitlines() or [""])[0]
            yield Finding(
                name, "fail", f"{type(error).__name__}: {text}"[:300], "see the error; is the package intact?"
            )
