"""Tries a GGUF file's metadata, from a listing of its keys: `KEY TYPE = VALUE`, a line each.

transformers reads the keys and builds the model that they describe; the gguf package names its
tensors. No listing has the vocabulary, so one is made up.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from support.gguf.gguf_files import known_name
from support.models.real_headers.header import Header
from support.models.real_headers.trial import Outcome, judged
from tokenizers import pre_tokenizers

from appliance.errors import ApplianceError
from appliance.model.source import open_model
from appliance.tokenizer.from_gguf import load_from_gguf

if TYPE_CHECKING:
    from pathlib import Path

_TYPES = {name.lower(): kind for name, kind in gguf.GGUFValueType.__members__.items()}
_SHORT = {"str": "string", "f32": "float32", "f64": "float64"}
_SHORT |= {f"{letter}{bits}": f"{'u' * (letter == 'u')}int{bits}"
           for letter in "ui" for bits in (8, 16, 32, 64)}  # fmt: skip
_IDS = ("bos_token_id", "eos_token_id")


def try_listing(file: Path, folder: Path) -> Outcome:
    """Open a file with these keys and sparse tensors, and compare it with transformers' model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    entries = dict(map(_entry, file.read_text().splitlines()))
    architecture = next(
        key.partition(".")[0] for key in entries if not key.startswith(("general.", "tokenizer."))
    )
    bare = folder / "bare" / "model.gguf"
    bare.parent.mkdir()
    _write(bare, architecture, entries, {})
    try:
        config = AutoConfig.from_pretrained(bare.parent, gguf_file=bare.name)
    except ValueError as error:
        return Outcome("untried", f"transformers reads no such file: {error}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).eval()
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shapes = {
        known_name(name, architecture, config.num_hidden_layers): _shape(tensor)
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    whole = folder / "model.gguf"
    _write(whole, architecture, entries, shapes)
    try:
        source = open_model(whole, in_torch=False)
        tokens = load_from_gguf(whole)
    except ApplianceError as error:
        return Outcome("refused", str(error))
    named = {name: entries.get(f"tokenizer.ggml.{name}", (None, None))[1] for name in _IDS}
    if tokens.bos_token_id != named["bos_token_id"]:
        return Outcome("wrong", f"BOS is {tokens.bos_token_id}, and the file says {named}")
    if named["eos_token_id"] not in tokens.eos_token_ids:
        return Outcome("wrong", f"ends {tokens.eos_token_ids}, and the file says {named}")
    context = entries[f"{architecture}.context_length"][1]
    return judged(Header(file.name, {"max_position_embeddings": context}), source, model)


def _entry(line: str) -> tuple[str, tuple[gguf.GGUFValueType, Any]]:
    key, kind, _, text = line.split(" ", 3)
    kind = kind.removeprefix("arr[").partition(",")[0]
    name = _SHORT.get(kind, kind)
    return key, (_TYPES[name], text if name == "string" and text[:1] != "[" else json.loads(text))


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's shape as converters write it: filters of one channel are matrices."""
    shape = tuple(tensor.shape)
    return (shape[0], shape[2]) if len(shape) == 3 and shape[1] == 1 else shape


def _write(
    path: Path,
    architecture: str,
    entries: dict[str, tuple[gguf.GGUFValueType, Any]],
    shapes: dict[str, tuple[int, ...]],
) -> None:
    """Write a file of 16-bit tensors, with a hole in place of their data."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("listed")
    for key, (kind, value) in entries.items():
        if isinstance(value, list):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, kind)
        else:
            writer.add_key_value(key, value, kind)
    count = entries[f"{architecture}.vocab_size"][1]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"<{n}>" for n in range(count - len(letters) - 1)]
    writer.add_token_list([*words, *letters, letters[0] + letters[1]])
    types = gguf.TokenType
    writer.add_token_types([types.CONTROL] * min(16, len(words)) + [types.NORMAL]
                           * (count - min(16, len(words))))  # fmt: skip
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    end = 0
    for name, shape in shapes.items():
        is_vector = len(shape) == 1
        size = (4 if is_vector else 2) * math.prod(shape)
        dtype = np.dtype(np.float32 if is_vector else np.float16)
        writer.add_tensor_info(name, list(shape), dtype, size)
        end += -(-size // writer.data_alignment) * writer.data_alignment
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        start = path.stat().st_size
        file.truncate(-(-start // writer.data_alignment) * writer.data_alignment + end)
