from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from worker.errors import ModelLoadError
from worker.model.cache import MANIFEST, ConvertedModels, default_cache_dir, is_intact, sha256_of

SHA = "ab" * 32


class Converter:
    """Writes two files, and counts how often it was asked to."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, directory: Path) -> None:
        self.calls += 1
        (directory / "config.json").write_text("{}")
        (directory / "weights").write_bytes(b"w" * 1000)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.gguf"
    path.write_bytes(b"GGUF...")
    return path


@pytest.fixture
def models(tmp_path: Path) -> ConvertedModels:
    return ConvertedModels(cache_dir=tmp_path / "cache")


def leftovers(models: ConvertedModels) -> list[str]:
    """Names in the cache other than finished models and locks."""
    names = [path.name for path in (models.cache_dir / "models").iterdir()]
    return [name for name in names if name.startswith(".") and not name.endswith(".lock")]


def test_a_model_is_converted_once(models: ConvertedModels, source: Path) -> None:
    convert = Converter()

    assert models.find("tiny", SHA) is None
    first = models.create("tiny", source, SHA, convert)
    second = models.create("tiny", source, SHA, convert)

    assert first == second == models.find("tiny", SHA)
    assert convert.calls == 1
    assert (first / "weights").read_bytes() == b"w" * 1000


def test_other_sources_and_names_get_directories_of_their_own(models: ConvertedModels) -> None:
    directories = {models.directory("a", SHA), models.directory("a", "cd" * 32), models.directory("b", SHA)}

    assert len(directories) == 3
    assert models.directory("../Evil Name!", SHA).parent == models.cache_dir / "models"


def test_an_interrupted_conversion_leaves_nothing_behind(models: ConvertedModels, source: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "weights").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.create("tiny", source, SHA, fail)

    assert leftovers(models) == []
    assert models.find("tiny", SHA) is None


def test_remains_of_a_killed_conversion_are_cleared_and_not_used(models: ConvertedModels, source: Path) -> None:
    directory = models.directory("tiny", SHA)
    stale = directory.parent / f".{directory.name}.tmp-dead"
    stale.mkdir(parents=True)
    (stale / "weights").write_bytes(b"half")
    directory.mkdir()
    (directory / "weights").write_bytes(b"no manifest beside it")

    assert models.create("tiny", source, SHA, Converter()) == directory

    assert is_intact(directory)
    assert leftovers(models) == []


@pytest.mark.parametrize("damage", ["truncate", "delete", "replace"])
def test_a_damaged_model_is_converted_again(models: ConvertedModels, source: Path, damage: str) -> None:
    convert = Converter()
    weights = models.create("tiny", source, SHA, convert) / "weights"
    if damage == "delete":
        weights.unlink()
    else:
        weights.write_bytes(b"w" * 10 if damage == "truncate" else b"x" * 1000)

    assert models.find("tiny", SHA) is None
    models.create("tiny", source, SHA, convert)

    assert convert.calls == 2
    assert weights.read_bytes() == b"w" * 1000


def test_a_copied_cache_is_accepted_after_comparing_hashes_and_then_cheaply(
    models: ConvertedModels, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = models.create("tiny", source, SHA, Converter())
    for path in directory.iterdir():
        os.utime(path, ns=(1, 1))
    hashed: list[Path] = []

    def counted(path: Path) -> str:
        hashed.append(path)
        return sha256_of(path)

    monkeypatch.setattr("worker.model.cache.sha256_of", counted)

    assert models.find("tiny", SHA) == directory
    assert len(hashed) == 2
    assert models.find("tiny", SHA) == directory
    assert len(hashed) == 2


def test_a_cache_that_may_only_be_read_still_serves(models: ConvertedModels, source: Path) -> None:
    directory = models.create("tiny", source, SHA, Converter())
    copied = models.cache_dir.with_name("copied")
    shutil.copytree(models.cache_dir, copied)
    there = ConvertedModels(cache_dir=copied).directory("tiny", SHA)
    assert there.name == directory.name
    there.chmod(0o555)
    try:
        assert is_intact(there)
    finally:
        there.chmod(0o755)


def test_a_copied_cache_on_a_read_only_disk_still_serves(
    models: ConvertedModels, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = models.create("tiny", source, SHA, Converter())
    for path in directory.iterdir():
        os.utime(path, ns=(1, 1))

    def refused(self: Path, *_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "write_text", refused)
    assert models.find("tiny", SHA) == directory


def test_verifying_finds_damage_that_size_and_time_hide(models: ConvertedModels, source: Path) -> None:
    directory = models.create("tiny", source, SHA, Converter())
    before = (directory / "weights").stat()
    (directory / "weights").write_bytes(b"x" * 1000)
    os.utime(directory / "weights", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert models.find("tiny", SHA) == directory

    assert models.find("tiny", SHA, verify=True) is None
    assert models.find("tiny", SHA) is None


def test_the_hash_of_an_unchanged_source_is_remembered(models: ConvertedModels, source: Path) -> None:
    assert models.known_sha256(source) is None
    models.create("tiny", source, SHA, Converter())
    assert models.known_sha256(source) == SHA

    source.write_bytes(b"GGUF, but another")
    assert models.known_sha256(source) is None


def test_a_manifest_lists_size_and_hash_of_every_file(models: ConvertedModels, source: Path) -> None:
    directory = models.create("tiny", source, SHA, Converter())

    files = json.loads((directory / MANIFEST).read_text())["files"]

    assert set(files) == {"config.json", "weights"}
    assert files["weights"]["size"] == 1000
    assert files["weights"]["sha256"] == sha256_of(directory / "weights")


CONTENDER = """
import sys, time
from pathlib import Path
from worker.model.cache import ConvertedModels
cache, source, log = map(Path, sys.argv[1:])
def convert(directory):
    with log.open("a") as file:
        file.write("x")
    time.sleep(0.5)
    (directory / "weights").write_bytes(b"w" * 1000)
print(ConvertedModels(cache_dir=cache).create("tiny", source, "ab" * 32, convert))
"""


def test_processes_that_want_the_same_model_at_once_convert_it_once(
    models: ConvertedModels, source: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", CONTENDER, str(models.cache_dir), str(source), str(log)]

    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate(timeout=60)[0].strip() for process in running}

    assert [process.returncode for process in running] == [0, 0, 0]
    assert log.read_text() == "x"
    assert answers == {str(models.directory("tiny", SHA))}


def test_a_killed_process_does_not_keep_the_lock(models: ConvertedModels, source: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    slow = CONTENDER.replace("sleep(0.5)", "sleep(60)")
    command = [sys.executable, "-c", slow, str(models.cache_dir), str(source), str(log)]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 30
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()

    assert models.create("tiny", source, SHA, Converter()) == models.directory("tiny", SHA)
    assert leftovers(models) == []


def test_the_cache_follows_the_platforms_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/graphpool")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert default_cache_dir() == Path("/home/x/.cache/graphpool")


def test_an_error_while_converting_reaches_the_caller(models: ConvertedModels, source: Path) -> None:
    def fail(directory: Path) -> None:
        raise ModelLoadError(f"nothing for {directory.name[:1]}")

    with pytest.raises(ModelLoadError, match="nothing for"):
        models.create("tiny", source, SHA, fail)
