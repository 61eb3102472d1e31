"""How a scripted engine behaves."""

from __future__ import annotations

from dataclasses import dataclass

from tests.fakes.script import TIERS, VOCAB_SIZE


@dataclass(slots=True, kw_only=True)
class ScriptKnobs:
    """How the engine behaves; may be changed while it runs."""

    step_s: float = 0.001
    tokens_per_step: int = 1
    max_rows: int = 64
    max_waiting: int = 256
    max_model_len: int = TIERS[-1]
    vocab_size: int = VOCAB_SIZE
    model: str = "script"
    gpu: str = ""
    """The UUID of the one it says to compute on."""
    crash_after_steps: int | None = None
    """The engine dies once it has run so many steps."""
    is_hanging: bool = False
    """Steps do not end."""
    hang_after_steps: int | None = None
    """The same, from that step on."""
    is_preparing: bool = False
    """The load says that steps may take longer."""
    stall_s: float = 0.5
    """A step that takes longer than this counts as stalled."""
    fail_on_prompt: tuple[int, ...] | None = None
    """A request of exactly this prompt ends with NumericalError after its second token."""
    readiness: str = "eager"
    """A GraphReadiness: what the load says of graphs."""
    has_tokenizer: bool = True
    has_chat_template: bool = True
