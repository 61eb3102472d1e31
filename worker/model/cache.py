"""The directory of models converted once and used by every later start, safe for many processes at once.

    ~/.cache/graphpool/models/<name>-<hash prefix>/     one converted model and its manifest.json
    ~/.cache/graphpool/models/.<...>.lock               held while it is being converted
    ~/.cache/graphpool/models/.<...>.tmp-*/             a conversion on its way; renamed when complete

The hash is of the source file and the converter's version, so a changed file or a better converter never meets an old
result. A directory is trusted when every file still has the size and modification time written in its manifest; after
a copy, which changes the times, the SHA-256 of every file is compared instead, once. `verify` compares them always.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.model.progress import Progress

CONVERTER_VERSION = 2
"""Raised whenever the converter's output changes."""
MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 22
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/graphpool`, or `~/.cache/graphpool`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphpool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedModels:
    """The converted models under one cache directory."""

    cache_dir: Path

    def find(self, name: str, source_sha256: str, *, verify: bool = False) -> Path | None:
        """The directory converted from a source with this hash, if it is complete and unchanged.

        `verify` reads every file, and forgets a directory that holds something else than was converted.
        """
        directory = self.directory(name, source_sha256)
        if is_intact(directory, verify=verify):
            return directory
        if verify:
            (directory / MANIFEST).unlink(missing_ok=True)
        return None

    def create(self, name: str, source: Path, source_sha256: str, convert: Callable[[Path], None]) -> Path:
        """The directory for `source`, made by `convert(empty directory)` unless another process already made it.

        An exception from `convert` leaves nothing behind.
        """
        directory = self.directory(name, source_sha256)
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory.parent / f".{directory.name}.lock"):
            if is_intact(directory):
                return directory
            _discard(directory)
            for stale in directory.parent.glob(f".{directory.name}.tmp-*"):
                _discard(stale)
            partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.tmp-", dir=directory.parent))
            try:
                convert(partial)
                _write_manifest(partial, source, source_sha256)
                partial.rename(directory)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        return directory

    def directory(self, name: str, source_sha256: str) -> Path:
        """Where the conversion of a source with this hash belongs."""
        key = hashlib.sha256(f"{source_sha256}:{CONVERTER_VERSION}".encode()).hexdigest()
        stem = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip(".-") or "model"
        return self.cache_dir / "models" / f"{stem[:64]}-{key[:12]}"

    def known_sha256(self, source: Path) -> str | None:
        """The hash of a source that was converted before and has the same path, size and time since."""
        for path in (self.cache_dir / "models").glob(f"*/{MANIFEST}"):
            found = (_read_manifest(path.parent) or {}).get("source", {})
            if found.get("path") == str(source.resolve()) and _matches(source, found):
                return str(found["sha256"])
        return None


def is_intact(directory: Path, *, verify: bool = False) -> bool:
    """Whether a converted model has every file its manifest lists, unchanged; `verify` reads them all."""
    manifest = _read_manifest(directory)
    if manifest is None:
        return False
    files = {directory / name: entry for name, entry in manifest["files"].items()}
    if not verify and all(_matches(path, entry) for path, entry in files.items()):
        return True
    if not all(path.is_file() and sha256_of(path) == entry["sha256"] for path, entry in files.items()):
        return False
    _replace_manifest(
        directory, {**manifest, "files": {path.name: _entry(path, e["sha256"]) for path, e in files.items()}}
    )
    return True


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """SHA-256 of a file, in hex."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress("checking the model file", done, total)
    return digest.hexdigest()


def _write_manifest(directory: Path, source: Path, source_sha256: str) -> None:
    files = sorted(path for path in directory.iterdir() if path.is_file())
    for path in files:
        _flush_to_disk(path)
    origin = {"path": str(source.resolve()), **_entry(source, source_sha256)}
    entries = {path.name: _entry(path, sha256_of(path)) for path in files}
    _replace_manifest(directory, {"converter": CONVERTER_VERSION, "source": origin, "files": entries})


def _replace_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Atomically; a cache that may only be read keeps the manifest it has."""
    partial = directory / f".{MANIFEST}.{os.getpid()}"
    try:
        partial.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        _flush_to_disk(partial)
        partial.replace(directory / MANIFEST)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise


def _read_manifest(directory: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def _entry(path: Path, sha256: str) -> dict[str, Any]:
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}


def _matches(path: Path, entry: dict[str, Any]) -> bool:
    try:
        stat = path.stat()
    except OSError:
        return False
    return stat.st_size == entry.get("size") and stat.st_mtime_ns == entry.get("mtime_ns")


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _discard(directory: Path) -> None:
    """Remove a directory under a name nobody looks for, so that no reader sees half of it."""
    if directory.exists():
        doomed = Path(tempfile.mkdtemp(prefix=f".{directory.name.lstrip('.')}.old-", dir=directory.parent))
        directory.rename(doomed / "old")
        shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock between processes; the system releases it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
