"""Compiles the sampling kernels for Hopper at large vocabularies, without a GPU, and prints what came out as JSON.

Run in a process of its own: `python -m tests.fakes.compile_sampling`.
"""

from __future__ import annotations

import json

import torch

from tests.fakes.offline_gpu import compiling_for_hopper, empty, resources
from tests.fakes.sampled_rows import Rows, sequence
from worker.sampling import SamplingParams


def main() -> None:
    with compiling_for_hopper() as compiled:
        from worker.kernels.sample import sample

        for vocab in (32_000, 128_256, 151_936):
            rows = Rows([sequence(SamplingParams(top_p=0.9))] * 1, empty(1, vocab, dtype=torch.float32))
            sample(rows.logits, rows.views)
        print(json.dumps([resources(kernel) for kernel in compiled]))


if __name__ == "__main__":
    main()
