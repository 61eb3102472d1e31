"""What a launch depends on besides its tensors' shapes."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

PROGRAMMATIC_LAUNCH_CAPABILITY = (9, 0)
CPU_SMS = 4
"""Multiprocessors that plans assume under the interpreter."""


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    return find_spec("triton") is not None


@cache
def has_gluon() -> bool:
    """Whether kernels in Triton's lower language can be: it is young, and not every release of Triton has it."""
    try:
        return has_triton() and find_spec("triton.experimental.gluon.language.nvidia.hopper") is not None
    except ModuleNotFoundError:  # of a package on the way there
        return False


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type != "cuda":
        return CPU_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def launches_programmatically(device: torch.device) -> bool:
    """Whether a kernel on this device may start while the one before it drains."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= PROGRAMMATIC_LAUNCH_CAPABILITY


@cache
def multiplies_in_groups(device: torch.device) -> bool:
    """Whether a device has the matrix instructions of Hopper's groups of warps, which GPUs before and after it lack."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == PROGRAMMATIC_LAUNCH_CAPABILITY[0]


@cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of every launch: the constexpr PDL, and the launch attribute that it needs."""
    return {"PDL": True, "launch_pdl": True} if launches_programmatically(device) else {"PDL": False}


def power_of_two(size: int) -> int:
    """The smallest power of two that holds `size`."""
    return 1 << max(size - 1, 0).bit_length()
