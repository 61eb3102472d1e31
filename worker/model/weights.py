"""Checkpoint tensors into a decoder, one by one, straight into their place in its fused matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from worker.errors import ModelLoadError, UnsupportedModel
from worker.model.decoder import Decoder, DecoderLayer
from worker.model.progress import Progress, silent

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = ("F32", "F16", "BF16", "F64")
_MAPPED_BYTES = 64 << 20
"""A file is mapped again after this much was read from it: the pages read so far leave the process with the map."""
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, not read yet."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


def load_weights(decoder: Decoder, paths: Sequence[Path], progress: Progress = silent) -> None:
    """Fill `decoder` from safetensors files, converting to its dtype.

    Raises ModelLoadError naming tensors that are missing, left over or of another shape, before anything is read.
    """
    stored = list_tensors(paths)
    targets = checkpoint_targets(decoder)
    if decoder.config.tie_word_embeddings:
        _settle_tied_head(stored, targets)
    _check_names(stored, targets, tied=decoder.config.tie_word_embeddings)
    for name, target in targets.items():
        _check_tensor(name, stored[name], target)
    total = sum(target.nbytes for target in targets.values())
    done = 0
    for path in paths:
        names = [name for name, tensor in stored.items() if tensor.path == path and name in targets]
        for name, tensor in _read(path, names):
            targets[name].copy_(tensor)
            done += targets[name].nbytes
            progress("loading the weights", done, total)
    _check_tied_head(decoder, stored, targets)


def list_tensors(paths: Sequence[Path]) -> dict[str, StoredTensor]:
    """Every tensor in these files by name, without the ones that a decoder computes by itself."""
    found: dict[str, StoredTensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if not name.endswith(".rotary_emb.inv_freq"):
                        view = file.get_slice(name)
                        found[name] = StoredTensor(path, tuple(view.get_shape()), view.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return found


def checkpoint_targets(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Where each checkpoint tensor goes: a parameter, or rows of one."""
    targets = {EMBEDDING: decoder.embedding.data, "model.norm.weight": decoder.final_norm.data}
    if not decoder.config.tie_word_embeddings:
        targets[LM_HEAD] = decoder.lm_head.data
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        for name, target in _layer_targets(layer).items():
            targets[f"model.layers.{layer.index}.{name}"] = target
    return targets


def _layer_targets(layer: DecoderLayer) -> dict[str, torch.Tensor]:
    q_size, kv_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    qkv = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    gate_up = {"mlp.gate_proj": layer.intermediate_size, "mlp.up_proj": layer.intermediate_size}
    hidden = layer.input_norm.shape[0]
    fused: list[tuple[nn.Parameter | None, str, dict[str, int]]] = [
        (layer.input_norm, "weight", {"input_layernorm": hidden}),
        (layer.qkv_weight, "weight", qkv),
        (layer.qkv_bias, "bias", qkv),
        (layer.q_norm, "weight", {"self_attn.q_norm": layer.head_dim}),
        (layer.k_norm, "weight", {"self_attn.k_norm": layer.head_dim}),
        (layer.o_weight, "weight", {"self_attn.o_proj": hidden}),
        (layer.o_bias, "bias", {"self_attn.o_proj": hidden}),
        (layer.post_attention_norm, "weight", {"post_attention_layernorm": hidden}),
        (layer.gate_up_weight, "weight", gate_up),
        (layer.gate_up_bias, "bias", gate_up),
        (layer.down_weight, "weight", {"mlp.down_proj": hidden}),
        (layer.down_bias, "bias", {"mlp.down_proj": hidden}),
    ]
    return {
        f"{name}.{kind}": part
        for parameter, kind, rows in fused
        if parameter is not None
        for name, part in zip(rows, torch.split(parameter.data, list(rows.values())), strict=True)
    }


def _settle_tied_head(stored: Mapping[str, StoredTensor], targets: dict[str, torch.Tensor]) -> None:
    """Where the one shared matrix is stored under the head's name alone, read it from there."""
    if LM_HEAD in stored and EMBEDDING not in stored:
        targets[LM_HEAD] = targets.pop(EMBEDDING)


def _check_names(stored: Mapping[str, StoredTensor], targets: Mapping[str, torch.Tensor], *, tied: bool) -> None:
    missing = [f"{name} {list(targets[name].shape)}" for name in targets if name not in stored]
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {_listed(missing)}")
    shared = {LM_HEAD} if tied else set()
    unexpected = [f"{name} {list(t.shape)}" for name, t in stored.items() if name not in targets and name not in shared]
    if unexpected:
        raise ModelLoadError(f"the checkpoint holds what the config does not account for: {_listed(unexpected)}")


def _check_tensor(name: str, stored: StoredTensor, target: torch.Tensor) -> None:
    if stored.shape != tuple(target.shape):
        raise ModelLoadError(f"{name} has shape {list(stored.shape)}, the config means {list(target.shape)}")
    if stored.dtype not in _DTYPES:
        raise UnsupportedModel(f"{name} is stored as {stored.dtype}; supported are {', '.join(_DTYPES)}")


def _check_tied_head(decoder: Decoder, stored: Mapping[str, StoredTensor], targets: Mapping[str, torch.Tensor]) -> None:
    """A head that a tied checkpoint stores as well must be the same matrix, or one of the two would be dropped."""
    if LM_HEAD not in stored or LM_HEAD in targets:
        return
    ((_, head),) = _read(stored[LM_HEAD].path, [LM_HEAD])
    if stored[LM_HEAD].shape != tuple(decoder.embedding.shape) or not torch.equal(
        head.to(decoder.embedding), decoder.embedding
    ):
        raise ModelLoadError(
            f"{LM_HEAD} differs from {EMBEDDING}, but the config says that they are one (tie_word_embeddings)"
        )


def _read(path: Path, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of one file; what is mapped into the process at a time stays near _MAPPED_BYTES."""
    position = 0
    while position < len(names):
        with safe_open(path, framework="pt") as file:
            mapped = 0
            while position < len(names) and mapped < _MAPPED_BYTES:
                tensor = file.get_tensor(names[position])
                mapped += tensor.nbytes
                yield names[position], tensor
                position += 1


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
