"""Compiles the sampling kernels for Hopper at a large vocabulary, without a GPU, and prints what came out as JSON.

Run in a process of its own: `python -m tests.fakes.compile_sampling`.
"""

from __future__ import annotations

import json

import torch

from tests.fakes.offline_gpu import compiling_for_hopper, empty, resources
from tests.fakes.sampled_rows import Rows, sequence
from worker.sampling import SamplingParams

VOCAB = 128_256


def main() -> None:
    with compiling_for_hopper() as compiled:
        from worker.kernels.sample import sample

        rows = Rows([sequence(SamplingParams(top_p=0.9))], empty(1, VOCAB, dtype=torch.float32))
        sample(rows.logits, rows.views)
        found = [
            resources(kernel)
            | {"fuses": "fma.rn.f32" in kernel.asm["ptx"], "may_fuse": kernel.metadata.enable_fp_fusion}
            for kernel in compiled
        ]
        print(json.dumps(found))


if __name__ == "__main__":
    main()
