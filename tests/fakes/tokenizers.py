"""Small tokenizers of the two kinds that models use, with every byte as a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level(special: Sequence[str] = SPECIAL, words: Sequence[str] = (), *, adds_bos: bool = False) -> Tokenizer:
    """Like GPT-2, Llama 3, Qwen: bytes, and whole words (without spaces) where given."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges, vocab = [], [*special, *alphabet]
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocab)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
        )
    return tokenizer


def byte_fallback(characters: str = "abcdefghijklmnopqrstuvwxyz") -> Tokenizer:
    """Like Llama 2 and Mistral: characters with a mark for spaces, and bytes for all others."""
    special = ["<unk>", "<s>", "</s>"]
    vocab = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *characters]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocab)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def write_tokenizer(directory: Path, tokenizer: Tokenizer) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
