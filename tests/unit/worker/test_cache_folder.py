"""Kernels are kept where they can be: no state of Triton's own folder keeps a worker from starting."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worker.kernels import cache_folder
from worker.kernels.cache_folder import settle_cache_folder


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where kernels go instead."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(cache_folder, "OTHER_PLACES", ())
    return tmp_path / "tmp" / f"graphpool-kernels-{os.geteuid()}"


def own_at(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(path))
    return path


def settled() -> Path:
    settle_cache_folder()
    return Path(os.environ["TRITON_CACHE_DIR"])


def make_unwritable(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere."""
    probe = tempfile.TemporaryFile

    def refused(**options: Any) -> Any:
        if options["dir"] == own:
            raise OSError(30, "Read-only file system")
        return probe(**options)

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)


def test_a_folder_that_can_be_written_stays_and_is_made_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = own_at(tmp_path / "not" / "there", monkeypatch)
    assert settled() == own
    assert list(own.iterdir()) == []
    assert not other.exists()
    assert not caplog.records


def test_the_folder_in_a_home_is_found_as_triton_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    knobs = pytest.importorskip("triton.knobs")
    own_at(tmp_path, monkeypatch)
    assert str(cache_folder._own_folder()) == knobs.cache_knobs().dir
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "triton"))
    assert str(cache_folder._own_folder()) == knobs.cache_knobs().dir
    monkeypatch.delenv("TRITON_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder._own_folder() == tmp_path / ".triton" / "cache"


def test_a_folder_that_cannot_be_written_is_read_and_new_kernels_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = own_at(tmp_path / "own", monkeypatch)
    (own / "KERNEL").mkdir(parents=True)
    (own / "KERNEL" / "code.cubin").write_bytes(b"code")
    make_unwritable(own, monkeypatch)
    assert settled() == other
    found = other / "KERNEL" / "code.cubin"
    assert found.read_bytes() == b"code"
    (tmp_path / "new").write_bytes(b"changed")
    (tmp_path / "new").replace(found)  # as Triton writes
    assert (own / "KERNEL" / "code.cubin").read_bytes() == b"code"
    assert [record.message for record in caplog.records] == [
        f"kernels are kept in {other}: {own} cannot be written (Read-only file system)"
    ]


def test_a_later_start_finds_what_an_earlier_one_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: Path
) -> None:
    own = own_at(tmp_path / "own", monkeypatch)
    make_unwritable(own, monkeypatch)
    (settled() / "BUILT").mkdir()
    own_at(own, monkeypatch)
    assert (settled() / "BUILT").is_dir()
    assert settled() == other  # now its own


@pytest.mark.parametrize("path", ["/dev/null/cache", "/proc/cache"])
def test_a_folder_that_cannot_be_made_is_gone_around(monkeypatch: pytest.MonkeyPatch, other: Path, path: str) -> None:
    own_at(Path(path), monkeypatch)
    assert settled() == other


@pytest.mark.parametrize("disk", [{"f_bavail": 10 << 20}, {"f_flag": os.ST_NOEXEC}])
def test_a_disk_that_is_full_or_runs_nothing_is_gone_around(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: Path, disk: dict[str, int]
) -> None:
    own = own_at(tmp_path / "own", monkeypatch)
    good = {"f_bavail": 1 << 30, "f_frsize": 1, "f_flag": 0}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**good | (disk if path == own else {})))
    assert settled() == other


def test_a_user_without_a_home_keeps_kernels_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: Path
) -> None:
    """Triton would make a folder called ~ in the working folder."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert settled() == other
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("kind", ["link", "open", "file", "foreign"])
def test_a_folder_that_others_may_have_filled_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """What is in it is executed."""
    own = own_at(Path("/dev/null/cache"), monkeypatch)
    if kind == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        other.symlink_to(tmp_path / "theirs")
    elif kind == "file":
        other.write_text("")
    else:
        other.mkdir(mode=0o700)
        other.chmod(0o777 if kind == "open" else 0o700)
    if kind == "foreign":
        monkeypatch.setattr(Path, "lstat", lambda _: SimpleNamespace(st_uid=os.geteuid() + 1, st_mode=0o40700))
    settle_cache_folder()
    assert os.environ["TRITON_CACHE_DIR"] == str(own)
    assert "kernels can be kept nowhere" in caplog.text
    assert "TRITON_CACHE_DIR" in caplog.text
