"""Which layer of a model cannot be captured, and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from worker.attention.fixed_prefill import FreshPrefillAttention

PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectReport:
    """What capturing the parts of a model showed."""

    model: str
    device: str
    num_tried: int
    """Parts of the model that were captured by themselves."""
    layer: str = ""
    """The innermost part that fails; empty if all is well."""
    layer_class: str = ""
    error: str = ""
    """Operator, source line, cause and remedy."""
    findings: tuple[str, ...] = ()
    """Everything a look at one eager run finds, in order."""

    @property
    def is_ok(self) -> bool:
        """Whether the whole model can be captured."""
        return not self.layer


def bisect_model(name: str, *, cache_dir: Path | None = None) -> BisectReport:
    """Capture the model as transformers builds it, over our paged attention, with random weights; then its parts.

    Without a GPU the captures are emulated. Raises ModelLoadError when there is no such model, UnsupportedModel when its
    attention cannot be replaced.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from worker.generic.attention import IMPLEMENTATION, attending
    from worker.model.source import resolve_model

    files = resolve_model(name, load_format="dummy", cache_dir=cache_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.for_model(**{"model_type": files.config["model_type"], **files.config})
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    model.set_attn_implementation(IMPLEMENTATION)
    tokens = torch.arange(PROBE_TOKENS, device=device)
    inputs = {"input_ids": tokens[None], "position_ids": tokens[None], "use_cache": False}
    with attending(_probe_attention(config, device)):
        return bisect_module(model.eval().requires_grad_(False), name, inputs)


def _probe_attention(config: Any, device: torch.device) -> FreshPrefillAttention:
    """Attention of one prompt over a KV pool that holds just it."""
    import torch

    from worker.attention.fixed_prefill import FreshPrefillAttention
    from worker.kv_cache import KVCache

    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    cache = KVCache(
        num_layers=text.num_hidden_layers,
        num_blocks=2,
        block_size=PROBE_TOKENS,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        dtype=torch.bfloat16,
        device=device,
    )
    return FreshPrefillAttention(cache, slots=torch.arange(PROBE_TOKENS, 2 * PROBE_TOKENS, device=device))


def bisect_module(module: Any, name: str, kwargs: dict[str, Any]) -> BisectReport:
    """The same for a module that exists, called with `kwargs`."""
    from worker.graphs.bisect import describe_findings, find_failing_layer

    device = str(next(module.parameters()).device)
    failing = find_failing_layer(module, kwargs=kwargs)
    if failing is None:
        return BisectReport(model=name, device=device, num_tried=1)
    return BisectReport(
        model=name,
        device=device,
        num_tried=len(failing.attempts),
        layer=failing.path,
        layer_class=failing.layer,
        error=str(failing.error),
        findings=tuple(describe_findings(module, kwargs=kwargs)),
    )
