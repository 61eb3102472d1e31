"""Which versions a file pins, and whether they fit each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from cluster.doctor.deploy.document import Document, Path
from cluster.doctor.finding import Finding

_RAY_REQUIREMENT = re.compile(r"(?:^|[\s'\"])ray(?:\[[\w,-]+\])?(?=$|[\s'\"=<>~!@])([^\s'\"]*)")
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_MOVING = ("latest", "nightly", "main", "dev", "stable")


def image_findings(document: Document, path: Path, image: str) -> Iterator[Finding]:
    """Whether a container image is one and the same tomorrow."""
    if "@sha256:" in image:
        return
    name, _, tag = image.rpartition("/")[2].partition(":")
    if not tag:
        yield document.find(
            "fail",
            path,
            f"{image} has no tag, so nodes started on different days differ",
            f"{name}:VERSION, or {name}@sha256:...",
        )
    elif tag.startswith(_MOVING):
        yield document.find(
            "fail",
            path,
            f"the tag {tag!r} moves: nodes started on different days differ",
            "a version or a digest as the tag",
        )


def install_findings(document: Document, path: Path, command: str) -> Iterator[Finding]:
    """Whether a command installs Ray in a version that stays."""
    if "pip install" not in command and "uv pip" not in command:
        return
    if "ray-wheels/latest" in command or "dev0" in command:
        yield document.find(
            "fail",
            path,
            "a nightly build of Ray is another one tomorrow",
            "ray[serve]==2.60.0, the version that you run `ray up` with",
        )
        return
    for match in _RAY_REQUIREMENT.finditer(command):
        if not match[1].startswith(("==", "@")) and "-c " not in command and "--constraint" not in command:
            yield document.find(
                "fail",
                path,
                "Ray is not pinned: nodes that start later get another version and cannot join",
                "ray[serve]==2.60.0, or pip's --constraint with a file of pins",
            )


def ray_version(text: str) -> str | None:
    """The version of Ray that an image or a command brings; None if it does not say."""
    if "pip install" in text:
        match = re.search(r"\bray(?:\[[\w,-]+\])?==(\d+\.\d+\.\d+)", text)
        return match[1] if match else None
    name, _, tag = text.rpartition("/")[2].partition(":")
    found = _VERSION.match(tag) if name.startswith("ray") else None
    return found[0] if found else None


def version_findings(
    document: Document, head: Iterable[tuple[Path, str]], workers: Iterable[tuple[Path, str]]
) -> Iterator[Finding]:
    """Whether head and workers run the same Ray; both are places and what stands there."""
    expected = next((version for _, text in head if (version := ray_version(text))), None)
    for path, text in workers:
        found = ray_version(text)
        if expected and found and found != expected:
            yield document.find(
                "fail",
                path,
                f"Ray {found} here, but {expected} on the head: the node cannot join",
                f"Ray {expected}, or the same version on all",
            )
