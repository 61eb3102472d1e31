"""A model of the first layers alone, for what only wants to see each kind of launch once."""

from __future__ import annotations

import copy

from torch import nn

from worker.causal_lm import CausalLM, NativeCausalLM
from worker.model.decoder import Decoder

NUM_LAYERS = 2
"""The first, and one that follows another."""


def shortened(model: CausalLM) -> CausalLM:
    """The same model, weights and all, without its later layers; one of a kind that has no such form stays whole."""
    short = copy.copy(model)
    if isinstance(short, NativeCausalLM):
        short.decoder = short.module = _first_layers(short.decoder)
    elif isinstance(getattr(short, "layers", None), list):
        short.layers = short.layers[:NUM_LAYERS]  # type: ignore[attr-defined]
    return short


def _first_layers(decoder: Decoder) -> Decoder:
    short = copy.copy(decoder)
    short._modules = {**decoder._modules, "layers": nn.ModuleList(list(decoder.layers)[:NUM_LAYERS])}
    return short
