"""Checks of the GPU: driver, CUDA, free memory, and a captured graph. Imports torch, when it runs."""

from __future__ import annotations

import shutil

from cluster.doctor.finding import Check, Finding

GIB = 1 << 30
OLDEST_CAPABILITY = (7, 0)


def gpu_checks() -> list[Check]:
    """All of them; on a machine without a GPU they say what follows from that."""
    return [
        ("driver", check_driver_and_cuda),
        ("GPU", check_gpu),
        ("GPU memory", check_gpu_memory),
        ("graph capture", check_capture),
        ("C compiler", check_compiler),
    ]


def check_driver_and_cuda() -> Finding:
    """Whether the driver runs the CUDA that torch was built for."""
    import torch

    from worker.graphs.cuda_backend import driver_version
    from worker.graphs.errors import DriverTooOld
    from worker.graphs.traps import check_driver

    driver, built_for = driver_version(), torch.version.cuda
    if driver is None:
        return Finding(
            "driver", "warn", "no NVIDIA driver: workers run on the CPU", "on a GPU machine, install the driver"
        )
    if built_for is None:
        return Finding(
            "driver", "fail", "there is a GPU driver, but torch was built without CUDA", "install a torch with CUDA"
        )
    try:
        check_driver(driver, built_for)
    except DriverTooOld as error:
        return Finding("driver", "fail", error.detail, error.remedy)
    return Finding("driver", "ok", f"supports CUDA {driver // 1000}.{driver % 1000 // 10}, torch has {built_for}")


def check_gpu() -> Finding:
    """Which GPUs torch sees."""
    import torch

    if not torch.cuda.is_available():
        return Finding(
            "GPU", "warn", "torch sees none: graphs are emulated", "nothing to do on a machine without a GPU"
        )
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_CAPABILITY:
        text = f"{names[0]} has compute capability {capability[0]}.{capability[1]}"
        return Finding("GPU", "fail", text, "7.0 or newer is needed")
    return Finding("GPU", "ok", ", ".join(names))


def check_gpu_memory() -> Finding:
    """Whether someone else is on the GPU already."""
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU memory", "ok", "no GPU")
    free, total = torch.cuda.mem_get_info()
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < 0.5 * total:
        return Finding("GPU memory", "warn", text, "another process holds the rest: nvidia-smi shows which")
    return Finding("GPU memory", "ok", text)


def check_capture() -> Finding:
    """Capture and replay one operation."""
    import torch

    from worker.graphs.smoke import smoke_test

    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = smoke_test(device)
    if result.is_ok:
        how = "one operation" if device == "cuda" else "one operation, emulated: there is no GPU"
        return Finding("graph capture", "ok", f"{how}, {1e3 * result.seconds:.0f} ms")
    return Finding("graph capture", "fail", result.detail[:300], "the message names cause and remedy")


def check_compiler() -> Finding:
    """Triton builds its launcher with a C compiler, the first time."""
    import torch

    found = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if found is not None:
        return Finding("C compiler", "ok", found)
    if torch.cuda.is_available():
        return Finding("C compiler", "fail", "none found", "install gcc: Triton needs it once for each machine")
    return Finding("C compiler", "ok", "none, and without a GPU none is needed")
