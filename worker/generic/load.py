"""Builds a transformers model from safetensors, or from its config alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from worker.errors import ModelLoadError, UnsupportedModel, WorkerError
from worker.generic.causal_lm import TransformersCausalLM, refuse_what_is_not_served
from worker.model.files import ModelFiles

log = logging.getLogger(__name__)

_SHOWN = 5


def load_transformers(
    files: ModelFiles, *, device: torch.device, dtype: torch.dtype, is_dummy: bool, seed: int
) -> TransformersCausalLM:
    """Raises ModelLoadError when transformers does not know the model, UnsupportedModel when we cannot serve it.

    What the config alone tells is refused before any weight takes memory, a checkpoint that lacks weights before any of
    them is made up.
    """
    try:
        with _quiet_transformers():
            config = _config(files)
            refuse_what_is_not_served(config.get_text_config(decoder=True))
            model = _from_config(config, device, dtype, seed) if is_dummy else _from_files(files, dtype)
            return TransformersCausalLM(model.to(device).eval().requires_grad_(False))
    except WorkerError:
        raise
    except Exception as error:  # every model class checks its config in its own way
        raise ModelLoadError(f"transformers cannot load {files.name}: {' '.join(str(error).split())}") from error


def _config(files: ModelFiles) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = files.config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModel(f"{files.name}: neither graphpool nor transformers knows model type {kind!r}")
    return AutoConfig.for_model(**{"model_type": kind, **files.config})


def _from_config(config: Any, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def _from_files(files: ModelFiles, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        files.directory,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, by name
    )
    _check_report(files.name, report)
    return model


def _check_report(name: str, report: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for weights that transformers has drawn at random because the files do not hold them."""
    missing = sorted(map(str, report.get("missing_keys", ())))
    if missing:
        raise ModelLoadError(f"{name}: the checkpoint lacks {_listed(missing)}")
    mismatched = sorted(str(entry[0]) for entry in report.get("mismatched_keys", ()))
    if mismatched:
        raise ModelLoadError(f"{name}: the checkpoint holds in another shape {_listed(mismatched)}")
    unused = sorted(map(str, report.get("unexpected_keys", ())))
    if unused:
        # Such as the vision tower of a model whose text is served.
        log.warning("%s: the model has no place for %s", name, _listed(unused))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without its progress bars and reports, which our own sentences stand for."""
    from transformers.utils import logging as chatter

    level, had_bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    try:
        yield
    finally:
        chatter.set_verbosity(level)
        if had_bars:
            chatter.enable_progress_bar()
