"""What every kernel computes, in plain torch: what tests compare them with."""

from __future__ import annotations

import torch
from torch.nn import functional

from worker.kernels.qkv_layout import QkvLayout


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """See worker.kernels.rms_norm."""
    if residual is not None:
        x = residual.add_(x)
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See worker.kernels.silu_mul."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def rope_and_cache(
    qkv: torch.Tensor,
    layout: QkvLayout,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """See worker.kernels.rope_cache."""
    q, k, v = layout.split(qkv)
    if layout.q_norm is not None and layout.k_norm is not None:
        q.copy_(functional.rms_norm(q, (layout.head_dim,), layout.q_norm, layout.eps))
        k.copy_(functional.rms_norm(k, (layout.head_dim,), layout.k_norm, layout.eps))
    for heads in (q, k):
        heads.copy_(_turn(heads.float(), layout.rope_table[positions]))
    keys.flatten(0, 1).index_copy_(0, slots, k.to(keys.dtype))
    values.flatten(0, 1).index_copy_(0, slots, v.to(values.dtype))


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """One query a row against its first `context_lens` tokens in the pool, row by row in float32.

    q [rows, heads, head_dim]; keys and values [num_blocks, block_size, kv_heads, head_dim] -> [rows, heads, head_dim].
    """
    out, repeats = torch.empty_like(q), q.shape[1] // keys.shape[2]
    for row, length in enumerate(context_lens.tolist()):
        first = 0 if sliding_window is None else max(length - sliding_window, 0)
        seen = [pool[block_tables[row]].flatten(0, 1)[first:length] for pool in (keys, values)]
        key, value = (tensor.float().repeat_interleave(repeats, dim=1) for tensor in seen)
        weights = torch.einsum("hd,thd->ht", q[row].float(), key).mul(scale).softmax(dim=-1)
        out[row] = torch.einsum("ht,thd->hd", weights, value)
    return out


def short_attention(
    qkv: torch.Tensor,
    layout: QkvLayout,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    positions: torch.Tensor,
    *,
    out: torch.Tensor,
) -> None:
    """See worker.kernels.short_attention."""
    turned, block_size = qkv.clone(), keys.shape[1]
    blocks = block_tables.gather(1, (positions // block_size)[:, None]).squeeze(1)
    slots = blocks.long() * block_size + positions % block_size
    rope_and_cache(turned, layout, positions, slots, keys, values)
    q = layout.split(turned)[0].to(keys.dtype).float()
    attended = paged_attention(q, keys, values, block_tables, positions + 1, scale=layout.head_dim**-0.5)
    out.copy_(attended.flatten(1))


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See worker.kernels.greedy."""
    logits = logits.float()
    is_finite = logits.amax(dim=-1).isfinite()
    return logits, torch.stack([logits.argmax(dim=-1), is_finite.long()], dim=-1)


def ordered_keys(logits: torch.Tensor) -> torch.Tensor:
    """See worker.kernels.greedy.ordered_key: of every token, int64."""
    bits = (logits.float() + 0.0).view(torch.int32).long()
    ordered = torch.where(logits.isnan(), 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (ordered << 32) | (0x7FFFFFFF - torch.arange(logits.shape[-1], device=logits.device))


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, size] and weight [outputs, size] -> [rows, outputs] in float32."""
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float())


def late_norm(squares: torch.Tensor, rows: int, size: int, eps: float) -> torch.Tensor:
    """squares [parts, columns >= rows] -> [rows, 1]: what scaled vectors of `size` are multiplied by to be normed."""
    return (squares[:, :rows].sum(dim=0) / size + eps).rsqrt()[:, None]


def gated(both: torch.Tensor) -> torch.Tensor:
    """both [rows, 2 * size] float32, gates first -> silu(gate) * up."""
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up


def prefill_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, *, scale: float | None = None
) -> torch.Tensor:
    """See worker.kernels.prefill_attention: k and v [keys, kv_heads, head_dim] in order; in float32."""
    query, key, value = (tensor.float().transpose(0, 1)[None] for tensor in (q, k, v))
    mask = torch.arange(k.shape[0], device=k.device) <= positions[:, None]
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _turn(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim] and angles [tokens, head_dim], both float32."""
    cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
