"""What no file of this kind should hold: secrets in plain text, and values that were left to be changed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cluster.doctor.deploy.document import Document
from cluster.doctor.finding import Finding

_KNOWN = re.compile(
    r"hf_[A-Za-z0-9]{20,}|\bAKIA[0-9A-Z]{16}\b|gh[pousr]_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_ASSIGNED = re.compile(r"\b\w*(?:TOKEN|SECRET|PASSWORD|API_KEY)=['\"]?([^\s'\"$;&|]+)", re.IGNORECASE)
_SECRET_NAME = re.compile(r"(^|_|\b)(token|secret|password|api_?key|private_key)$", re.IGNORECASE)
_PLACEHOLDER = re.compile(
    r"\bCHANGE[-_ ]?ME\b|<[a-z][a-z -]*>|ami-0{6,}|\bmy-project\b|\bregistry\.example\b|\bexample\.(com|org)\b"
)
_MIN_SECRET_CHARS = 8
_REMEDY = "keep it in a file that only its owner reads, or in a Kubernetes Secret, name that here, and replace this secret: it is known now"


def secret_findings(document: Document) -> Iterator[Finding]:
    """Secrets written into the file; they are not repeated."""
    for path, value in document.scalars():
        if isinstance(value, str) and _is_secret(document, path, value):
            yield document.find(
                "fail", path, "a secret stands in the file in plain text, for all who can read it", _REMEDY
            )


def placeholder_findings(document: Document) -> Iterator[Finding]:
    """Values that only the reader can know."""
    for path, value in document.scalars():
        if isinstance(value, str) and _PLACEHOLDER.search(value):
            yield document.find("warn", path, f"{value!r:.80} stands for a value of yours", "put yours in its place")


def _is_secret(document: Document, path: tuple[str | int, ...], value: str) -> bool:
    if _KNOWN.search(value):
        return True
    assigned = _ASSIGNED.search(value)
    if assigned and _is_literal(assigned[1]):
        return True
    name = str(path[-1]) if path else ""
    if name == "value":  # of a container's environment variable
        name = str(document.get(*path[:-1], "name", default=""))
    return bool(_SECRET_NAME.search(name)) and _is_literal(value)


def _is_literal(value: str) -> bool:
    """Whether it is the secret itself, not the path or the name of where it is."""
    return len(value) >= _MIN_SECRET_CHARS and not value.startswith(("/", "~", "$", "./", "{{")) and " " not in value
