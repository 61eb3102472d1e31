"""A model of the first layers alone, for what only wants to see each kind of launch once."""

from __future__ import annotations

import copy

from torch import nn

from worker.causal_lm import CausalLM
from worker.model.decoder import Decoder

NUM_LAYERS = 2
"""The first, and one that follows another."""


def shortened(model: CausalLM) -> CausalLM:
    """The same model, weights and all, without its later layers; one that is no native decoder stays whole."""
    decoder = getattr(model, "decoder", None)
    if not isinstance(decoder, Decoder):
        return model
    short, first = copy.copy(model), _first_layers(decoder)
    vars(short).update(decoder=first, module=first)
    return short


def _first_layers(decoder: Decoder) -> Decoder:
    short = copy.copy(decoder)
    short._modules = {**decoder._modules, "layers": nn.ModuleList(decoder.each_layer()[:NUM_LAYERS])}
    return short
