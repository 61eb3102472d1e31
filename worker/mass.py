"""Probability mass in whole numbers: sums that do not depend on their order, and so on no launch shape or device.

The likeliest token of a row has the mass 2**40; another has 2**(40 + y), rounded down, where y <= 0 is its distance from
the likeliest in units of a factor of two. The exponential is a polynomial whose every step is one rounded operation, so
that torch on any device and the fused kernels compute the same bits.
"""

from __future__ import annotations

import torch

from worker.rng import UNIFORM_BITS

UNIT_BITS = 40
UNIT = 1 << UNIT_BITS
"""The mass of the likeliest token."""
MANTISSA_BITS = 23
LEAST_EXPONENT = -63.0
"""Anything below has no mass."""
COEFFICIENTS = (0.001867130166, 0.009017029777, 0.05579991266, 0.2401644439, 0.6931512952, 1.0)
"""Of a polynomial for 2**f, f in [0, 1), highest power first; wrong by less than 2e-7 of the value."""
FRACTION_ONE = 1 << UNIFORM_BITS
"""Uniform numbers and top-p are fractions of this."""


def masses(exponents: torch.Tensor) -> torch.Tensor:
    """y float32, at most 0 -> int64. NaN has no mass."""
    clamped = torch.fmax(exponents, exponents.new_full((), LEAST_EXPONENT))
    whole = clamped.floor()
    rest = clamped.sub_(whole)
    power = rest * COEFFICIENTS[0]
    for coefficient in COEFFICIENTS[1:-1]:
        power = power.add_(coefficient).mul_(rest)  # two roundings: fused into one they would give other bits
    power.add_(COEFFICIENTS[-1])
    # A power of two more in the exponent, and what is left of the point cut off: exact.
    raised = whole.to(torch.int32).add_(UNIT_BITS).bitwise_left_shift_(MANTISSA_BITS)
    return raised.add_(power.view(torch.int32)).view(torch.float32).to(torch.int64)


def share(total: torch.Tensor, fraction: torch.Tensor) -> torch.Tensor:
    """floor(total * fraction / 2**24) without overflow, for total < 2**62 and fraction <= 2**24; int64 both."""
    high, low = total >> UNIFORM_BITS, total & (FRACTION_ONE - 1)
    return high * fraction + ((low * fraction) >> UNIFORM_BITS)


def share_up(total: torch.Tensor, fraction: torch.Tensor) -> torch.Tensor:
    """The same, rounded up."""
    high, low = total >> UNIFORM_BITS, total & (FRACTION_ONE - 1)
    return high * fraction + ((low * fraction + (FRACTION_ONE - 1)) >> UNIFORM_BITS)


def ordered_keys(values: torch.Tensor) -> torch.Tensor:
    """float32 -> int32 in the same order; minus zero equals zero."""
    bits = (values + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def token_keys(values: torch.Tensor) -> torch.Tensor:
    """[..., vocab] float32 -> int64 in the order of the choice: the larger value first, then the lower id."""
    ids = torch.arange(values.shape[-1], device=values.device)
    return (ordered_keys(values).to(torch.int64) << 32) | (0x7FFFFFFF - ids)
