"""One decode step as a function of static tensors: eager runs call it, graphs are recordings of it."""

from __future__ import annotations

from worker.causal_lm import CausalLM
from worker.decode_inputs import DecodeViews
from worker.step_kernels import Outputs, StepKernels


def decode_step(model: CausalLM, kernels: StepKernels, inputs: DecodeViews) -> Outputs:
    """Compute the rows' next tokens, and leave the inputs as the next step over the same rows wants them."""
    whole = kernels.whole_step(model, inputs)
    if whole is not None:
        return whole
    logits = model.compute(kernels.tokens(inputs), inputs.positions, kernels.decode(inputs), None)
    return kernels.advance(logits, inputs)
