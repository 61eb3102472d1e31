"""Where Triton keeps kernels, also on a machine where it could not keep them where it would."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

VARIABLE = "TRITON_CACHE_DIR"
MIN_FREE_BYTES = 128 << 20
"""The kernels of two workers take about as much."""
OTHER_PLACES = ("/var/tmp", "/dev/shm")  # noqa: S108 (folders there are checked to be this user's alone)


def settle_cache_folder() -> None:
    """Where Triton's folder cannot be written, is full, or runs no code, have it use one of this user's that can.

    Without a folder to write to, Triton compiles nothing at all. Kernels that are in its own are then found in the other
    one, too, which stays for later starts. This process's TRITON_CACHE_DIR says it to all that it starts.
    """
    own = _own_folder()
    wrong = _what_is_wrong(own)
    if not wrong:
        return
    for place in (os.environ.get("TMPDIR") or "/tmp", *OTHER_PLACES):  # noqa: S108
        folder = Path(place) / f"graphpool-kernels-{os.geteuid()}"
        if _is_private(folder) and not _what_is_wrong(folder):
            _link_entries(own, folder)
            os.environ[VARIABLE] = str(folder)
            log.warning("kernels are kept in %s: %s", folder, wrong)
            return
    log.warning("kernels can be kept nowhere: %s; set %s to a folder that can be written", wrong, VARIABLE)


def _own_folder() -> Path:
    """As Triton chooses it."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    return Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~")) / ".triton" / "cache"  # noqa: PTH111 (raises)


def _what_is_wrong(folder: Path) -> str:
    """Why kernels cannot be kept in `folder`, which is made if it is not there; empty = they can."""
    if str(folder).startswith("~"):
        return "this user has no home"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))
        disk = os.statvfs(folder)
        if disk.f_flag & os.ST_NOEXEC:
            return f"nothing in {folder} can be executed"
        if disk.f_bavail * disk.f_frsize < MIN_FREE_BYTES:
            return f"less than {MIN_FREE_BYTES >> 20} MiB are free in {folder}"
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"
    return ""


def _is_private(folder: Path) -> bool:
    """Make it, or find that it is this user's and nobody else's: what is in it is executed."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        return (
            folder.is_dir() and not folder.is_symlink() and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        )
    return False


def _link_entries(own: Path, folder: Path) -> None:
    """Have the kernels in `own` found in `folder`; each file by itself, so that any of them can be written anew."""
    with contextlib.suppress(OSError):
        for entry in own.iterdir():
            if entry.is_dir() and not (folder / entry.name).exists():
                _link_files(entry, folder / entry.name)


def _link_files(entry: Path, linked: Path) -> None:
    linked.mkdir()
    for path in entry.iterdir():
        if path.is_file():
            (linked / path.name).symlink_to(path.resolve())
