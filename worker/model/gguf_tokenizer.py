"""The tokenizer inside a GGUF file, as `tokenizer.json` and `tokenizer_config.json`.

`transformers` builds it; what its conversion leaves out for a known pre-tokenizer (digits on their own, Unicode
normalisation, whole words before merges, the begin-of-sequence token) is put back, and an unknown pre-tokenizer is
refused, since splitting text in another way than in training silently costs quality.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors

from worker.errors import UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class _ByteLevelKind:
    """How one family of byte-level vocabularies was trained."""

    digits: bool = False
    """Every digit is a word of its own."""
    nfc: bool = False
    """Text is normalised to NFC first."""
    whole_words: bool = False
    """A word that is in the vocabulary is taken whole, without going through merges."""
    adds_bos: bool = False
    """Begins with the begin-of-sequence token unless the file says otherwise."""


_LLAMA3 = _ByteLevelKind(whole_words=True, adds_bos=True)
_QWEN2 = _ByteLevelKind(nfc=True)
_DIGITS = _ByteLevelKind(digits=True)
_KINDS: Mapping[str, _ByteLevelKind] = {
    "gpt-2": _ByteLevelKind(),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "tekken": _ByteLevelKind(whole_words=True, adds_bos=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def check_tokenizer(metadata: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for a tokenizer this module cannot rebuild exactly."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model == "gpt2" and pre not in _KINDS:
        raise UnsupportedModel(f"GGUF pre-tokenizer {pre!r}; supported are {', '.join(sorted(_KINDS))}")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(f"GGUF tokenizer model {model!r}; supported are gpt2, llama")


def write_tokenizer(source: Path, metadata: Mapping[str, Any], directory: Path) -> None:
    """Write the tokenizer of the GGUF file `source`, whose key-value table is `metadata`, into `directory`."""
    from transformers import AutoTokenizer

    check_tokenizer(metadata)
    built = AutoTokenizer.from_pretrained(
        str(source.parent), gguf_file=source.name, local_files_only=True, trust_remote_code=False
    )
    tokenizer: Tokenizer = built.backend_tokenizer
    kind = _ByteLevelKind(adds_bos=True)
    if metadata["tokenizer.ggml.model"] == "gpt2":
        kind = _KINDS[metadata["tokenizer.ggml.pre"]]
        _restore_text_rules(tokenizer, kind)
    tokenizer.post_processor = _post_processor(metadata, kind)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_tokenizer_config(metadata, directory)


def _restore_text_rules(tokenizer: Tokenizer, kind: _ByteLevelKind) -> None:
    if kind.digits:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    if kind.whole_words:
        tokenizer.model.ignore_merges = True


def _post_processor(metadata: Mapping[str, Any], kind: _ByteLevelKind) -> processors.PostProcessor:
    """Adds the special tokens that begin and end every sequence, if any."""
    single, special = ["$A:0"], []
    for place, name, default in ((0, "bos", kind.adds_bos), (len(single) + 1, "eos", False)):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None or not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            continue
        token = metadata["tokenizer.ggml.tokens"][token_id]
        single.insert(place, f"{token}:0")
        special.append((token, token_id))
    pair = [*single, "$B:1"]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _write_tokenizer_config(metadata: Mapping[str, Any], directory: Path) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    # This class takes tokenizer.json as it is; model-specific ones rebuild parts of it.
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if template := metadata.get("tokenizer.chat_template"):
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
