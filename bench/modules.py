"""Plain modules that graphs are captured of by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Mlp(nn.Module):
    """2048-8192-2048 by default."""

    def __init__(self, width: int = 2048, inner: int = 8192) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3 * self.heads, -1).transpose(1, 2).chunk(3, dim=1)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), Mlp(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Transformer(nn.Module):
    """A stack of blocks, without embeddings."""

    def __init__(self, layers: int = 16, width: int = 512, heads: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class StaticDecodeStep(nn.Module):
    """One token of a transformers model over its StaticCache, at a position that tensors say."""

    def __init__(self, model: Any, *, batch: int, context: int, length: int) -> None:
        super().__init__()
        from transformers import StaticCache

        self.model = model
        self.context = context
        self.length = length
        self.cache = StaticCache(model.config, max_cache_len=length)
        ids = torch.randint(0, model.config.vocab_size, (batch, context), device=model.device)
        with torch.no_grad():
            model(ids, past_key_values=self.cache, use_cache=True)

    def forward(self, token: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.model(
            input_ids=token, position_ids=position, attention_mask=mask, past_key_values=self.cache, use_cache=True
        ).logits
        return logits[:, -1]

    def rewind(self) -> None:
        """Back to the end of the context."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)

    def inputs(self, batch: int) -> dict[str, Tensor]:
        """Of the first token after the context."""
        device = self.model.device
        seen = torch.arange(self.length, device=device) <= self.context
        return {
            "token": torch.zeros(batch, 1, dtype=torch.int64, device=device),
            "position": torch.full((batch, 1), self.context, device=device),
            "mask": seen.view(1, 1, 1, -1).expand(batch, -1, -1, -1).contiguous(),
        }


def made(module: nn.Module, device: str) -> nn.Module:
    """In half precision on a GPU, in float32 on the CPU, without gradients."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    return module.to(device=device, dtype=dtype).eval().requires_grad_(False)


def hf_model(name: str, device: str) -> Any:
    """Random weights of a public shape; the tiny shape on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from bench.shapes import SHAPES, TINY_SHAPE

    torch.manual_seed(0)
    config = AutoConfig.for_model(**(TINY_SHAPE if device == "cpu" else SHAPES[name]))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    return model.eval().requires_grad_(False)
