"""A tokenizer whose token n < 256 is byte n, so that tests can predict an echo's text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

# Tokens from 256 on; the spare ones make an echo misbehave, see echo_worker.py.
SPECIAL = ["<eos>", "<|im_start|>", "<|im_end|>", *(f"<spare{n}>" for n in range(259, 272))]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


def save_byte_tokenizer(
    folder: Path, template: str = TEMPLATE, *, special: Sequence[str] = ()
) -> None:
    """Write the tokenizer's files.

    Args:
        folder: an existing one.
        template: the chat template.
        special: control tokens beside those of `SPECIAL`.
    """
    alphabet = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    vocabulary = {chr(byte) if byte in alphabet else chr(next(others)): byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*SPECIAL, *special])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "chat_template": template})
    )
