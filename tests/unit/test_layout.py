"""The shape of the repository: import roots, light imports, file sizes, and the words that may not be in it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cluster", "worker", "protos")
SOURCE_FOLDERS = (*PACKAGES, "bench", "deploy", "tests")
HEAVY = ("torch", "ray", "transformers")
LONGEST_FILE = 400
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK")) + r")\b")


def sources(*suffixes: str) -> Iterator[Path]:
    """Every file of ours with one of these suffixes, generated stubs left out."""
    for folder in SOURCE_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes and "_pb2" not in path.name and "__pycache__" not in path.parts:
                yield path


def loaded_after(statement: str) -> set[str]:
    """Top-level names of the modules that are loaded once a fresh interpreter has run `statement`."""
    report = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}; {report}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_resolves_to_this_checkout(package: str) -> None:
    spec = find_spec(package)
    assert spec is not None
    assert [Path(place).resolve() for place in spec.submodule_search_locations or ()] == [ROOT / package]


@pytest.mark.parametrize(
    "module", ["cluster.router.server", "cluster.cli.app", "cluster.client", "cluster.serve_app", "cluster.local_pool"]
)
def test_control_code_loads_no_model_library_and_no_ray(module: str) -> None:
    assert not loaded_after(f"import {module}") & set(HEAVY)


def test_the_command_line_loads_no_grpc_before_it_is_needed() -> None:
    assert not loaded_after("import cluster.cli.app") & {"grpc", "google"}


@pytest.mark.parametrize("module", ["errors", "sampling", "request", "load", "service", "config", "tiers"])
def test_the_boundary_modules_of_a_worker_load_no_torch(module: str) -> None:
    assert "torch" not in loaded_after(f"import worker.{module}")


def test_no_package_marker_lies_under_tests() -> None:
    # One would let the tests' folders shadow the packages of the same name.
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_every_source_file_is_short() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in sources(".py", ".proto")}
    assert lengths
    assert {path: length for path, length in lengths.items() if length > LONGEST_FILE} == {}


def test_nothing_is_left_unfinished() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "Makefile", ROOT / ".ci" / "run"]
    files = [*sources(".py", ".proto", ".yaml", ".yml", ".toml", ".md"), *documents]
    marked = [f"{path.relative_to(ROOT)}: {word}" for path in files for word in UNFINISHED.findall(path.read_text())]
    assert marked == []


def test_every_module_defers_its_annotations() -> None:
    late = [
        path.relative_to(ROOT)
        for path in sources(".py")
        if re.search(r"^(def|class|async def|@)", text := path.read_text(), re.MULTILINE)
        and "from __future__ import annotations" not in text
    ]
    assert late == []


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        named = set(re.findall(r"(?:^|`)make (?:[A-Z_]+=\S+ )*([a-z]+)", document.read_text(), re.MULTILINE))
        assert named <= targets, f"{document.name} names {sorted(named - targets)}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180
