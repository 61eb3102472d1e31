"""Rotary position embedding: what a config may ask for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from worker.errors import UnsupportedModel

RopeKind = Literal["default", "linear", "llama3", "yarn"]
DEFAULT_THETA = 10_000.0

_OPTIONS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate"),
        }
    ),
}
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions turn queries and keys."""

    kind: RopeKind = "default"
    theta: float = DEFAULT_THETA
    """Base of the wavelengths."""
    factor: float = 1.0
    """How many times longer the context is than in training."""
    original_max_position_embeddings: int = 0
    """Context length before it was extended (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    """Wavelengths between context / low and context / high are interpolated (llama3)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """Rotations over the original context where interpolation begins and is complete (yarn)."""
    truncate: bool = True
    """Whether those borders are rounded to whole dimensions (yarn)."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn)."""

    def __post_init__(self) -> None:
        if self.kind not in _OPTIONS:
            raise ValueError(f"rope kind {self.kind!r} is not one of {', '.join(_OPTIONS)}")
        if self.theta <= 1 or self.factor <= 0:
            raise ValueError(f"rope theta {self.theta} and factor {self.factor} must be over 1 and over 0")
        if self.kind in ("llama3", "yarn") and self.original_max_position_embeddings < 1:
            raise ValueError(f"{self.kind} needs original_max_position_embeddings")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"high_freq_factor {self.high_freq_factor} must exceed low {self.low_freq_factor}")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> RopeConfig:
        """From a `config.json` in either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`.

        Raises UnsupportedModel naming a kind or an option that is not implemented.
        """
        given = {**(config.get("rope_scaling") or config.get("rope_parameters") or {})}
        kind = given.pop("rope_type", given.pop("type", "default"))
        given.pop("type", None)
        theta = given.pop("rope_theta", None) or config.get("rope_theta") or DEFAULT_THETA
        options = {name: value for name, value in given.items() if value is not None}
        _check_partial(options.pop("partial_rotary_factor", config.get("partial_rotary_factor")))
        _check_options(kind, options)
        if kind in ("llama3", "yarn"):
            original = config.get("original_max_position_embeddings")
            options.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
            options["original_max_position_embeddings"] = original or options["original_max_position_embeddings"]
        if kind == "yarn":
            options = _yarn_options(options)
        return cls(kind=kind, theta=float(theta), **options)


def _check_partial(share: float | None) -> None:
    if share not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor = {share} is not implemented")


def _check_options(kind: str, options: Mapping[str, Any]) -> None:
    if kind not in _OPTIONS:
        raise UnsupportedModel(f"rope scaling {kind!r} is not implemented; supported are {', '.join(_OPTIONS)}")
    if unknown := sorted(set(options) - _OPTIONS[kind]):
        raise UnsupportedModel(f"rope scaling {kind!r} with {unknown[0]} = {options[unknown[0]]!r} is not implemented")
    if missing := [name for name in _REQUIRED[kind] if name not in options]:
        raise UnsupportedModel(f"rope scaling {kind!r} does not state {missing[0]}")


def _yarn_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve the attention factor, which may be left to follow from the scaling factor."""
    kept = {name: value for name, value in options.items() if not name.startswith("mscale")}
    for beta in ("beta_fast", "beta_slow"):
        if not kept.get(beta, True):
            del kept[beta]
    weights = (options.get("mscale"), options.get("mscale_all_dim"))
    above, below = weights if all(weights) else (1.0, 0.0)
    factor = options["factor"]
    kept.setdefault("attention_factor", _mscale(factor, above) / _mscale(factor, below))
    return kept


def _mscale(factor: float, weight: Any) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
