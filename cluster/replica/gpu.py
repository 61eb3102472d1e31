"""Which GPU a replica computes on."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def gpu_of(device: str) -> str:
    """The UUID of a torch device, as `nvidia-smi -L` has it; "" for what is no CUDA device, or does not say.

    An index would not do: it is counted within what the process may see. Imports torch for a CUDA device.
    """
    if not device.startswith("cuda"):
        return ""
    import torch

    try:
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    except (RuntimeError, AssertionError, ValueError) as error:
        log.warning("%s does not say which GPU it is: %s", device, type(error).__name__)
        return ""
    return "" if uuid is None else f"GPU-{uuid}"
