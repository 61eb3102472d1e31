"""From files to a decoder that can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from worker.errors import InvalidRequest, ModelLoadError
from worker.model.architecture import DecoderConfig
from worker.model.decoder import Decoder
from worker.model.files import ModelFiles
from worker.model.progress import Progress, silent
from worker.model.source import LoadFormat
from worker.model.weights import load_weights
from worker.sampling import SamplingParams

_DUMMY_STD = 0.02
_SHAPING = ("temperature", "top_p", "top_k", "min_p")
_DEFAULTS = (*_SHAPING, "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A decoder with its weights, and what its authors recommend."""

    decoder: Decoder
    """In evaluation mode, without gradients."""
    config: DecoderConfig
    eos_token_ids: tuple[int, ...]
    """Each of them ends an answer. Empty when the model names none."""
    generation_defaults: dict[str, float]
    """SamplingParams fields that `generation_config.json` sets: temperature, top_p, top_k, min_p, repetition_penalty."""


def load_model(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> LoadedModel:
    """Build the decoder on `device` and fill it, from the files or ("dummy") with random weights drawn from `seed`.

    Raises UnsupportedModel for an architecture or option that is not implemented, ModelLoadError for a checkpoint that
    does not fit its config.
    """
    config = DecoderConfig.from_dict(files.config)
    decoder = Decoder(config, dtype=dtype, device=device).eval()
    if load_format == "dummy":
        randomise(decoder, seed)
    else:
        load_weights(decoder, files.safetensors, progress or silent)
    return LoadedModel(
        decoder=decoder,
        config=config,
        eos_token_ids=eos_token_ids(files),
        generation_defaults=generation_defaults(files.generation_config),
    )


def randomise(decoder: Decoder, seed: int) -> None:
    """Normal weights with a standard deviation of 0.02, norms of one; the same for one seed on one kind of device."""
    generator = torch.Generator(decoder.embedding.device).manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=_DUMMY_STD, generator=generator)


def eos_token_ids(files: ModelFiles) -> tuple[int, ...]:
    """The ids that end an answer: the generation config's, or else the config's; one id or a list of them."""
    for content in (files.generation_config, files.config):
        ids = content.get("eos_token_id")
        if ids is not None:
            return tuple(dict.fromkeys(_ids(ids)))
    return ()


def generation_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """The sampling defaults of a model. Raises ModelLoadError when no request with them would be accepted."""
    found = {name: generation_config[name] for name in _DEFAULTS if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        # These would only be read by a sampler that is off.
        found = {name: value for name, value in found.items() if name not in _SHAPING} | {"temperature": 0.0}
    try:
        SamplingParams(**found)
    except (InvalidRequest, TypeError) as error:
        raise ModelLoadError(f"generation_config.json: {error}") from error
    return found


def _ids(value: object) -> list[int]:
    items = value if isinstance(value, list) else [value]
    ids = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
    if len(ids) != len(items):
        raise ModelLoadError(f"eos_token_id is {value!r}, neither a token id nor a list of them")
    return ids
