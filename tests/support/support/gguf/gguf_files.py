"""Writes the GGUF files of tests: settings by their Python types, tensors by their GGUF names."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor

from appliance.gguf import read_header


def write_gguf_file(
    path: Path,
    architecture: str,
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    packed: Callable[[str, Any], Any] = lambda name, data: None,
    others: Mapping[str, int] | None = None,
) -> Path:
    """Write a file.

    Args:
        settings: by key without the architecture's prefix; a dot in front marks a key that has
            none. A pair is a value and its type.
        packed: gives a tensor's quantized type, from its name and numbers; None writes float32.
        others: whole numbers under full names.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in settings.items():
        full = key[1:] if key.startswith(".") else f"{architecture}.{key}"
        if isinstance(value, tuple):
            writer.add_key_value(full, *value)
            continue
        adds: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        adds[type(value)](full, value)
    for key, value in (others or {}).items():
        writer.add_uint32(key, value)
    for name, tensor in tensors.items():
        data = np.ascontiguousarray(tensor.float().numpy())
        kind = packed(name, data)
        if kind is None:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def first_layers(path: Path, out: Path, architecture: str, layers: int) -> Path:
    """Write a file of a model's first layers: its metadata bytes, and those layers' tensors."""
    header = read_header(path, vocabulary=False)
    kept = [info for name, info in header.tensors.items() if _layer_of(name) < layers]
    content = path.read_bytes()
    first = next(iter(header.tensors)).encode()
    infos_at = content.find(struct.pack("<Q", len(first)) + first)
    metadata = bytearray(content[24:infos_at])  # after the magic, the version and both counts
    key = f"{architecture}.block_count".encode() + struct.pack("<I", gguf.GGUFValueType.UINT32)
    struct.pack_into("<I", metadata, metadata.index(key) + len(key), layers)
    infos, data = b"", b""
    for info in kept:
        sizes = tuple(reversed(info.shape))
        number = gguf.GGMLQuantizationType[info.type.name]
        infos += struct.pack("<Q", len(info.name)) + info.name.encode()
        infos += struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, number, len(data))
        data += _padded(content[info.offset : info.offset + info.nbytes])
    counts = struct.pack("<QQ", len(kept), struct.unpack_from("<Q", content, 16)[0])
    out.write_bytes(_padded(content[:8] + counts + metadata + infos) + data)
    return out


def with_metadata(path: Path, out: Path, entries: Iterable[tuple[str, Any]]) -> Path:
    """Write a file with other metadata, valid or not; a key may come twice.

    Numbers have the narrowest usual type. Bytes are written as they are: a type, then a value.
    """
    header = read_header(path, vocabulary=False)
    content = path.read_bytes()
    first = next(iter(header.tensors)).encode()
    infos_at = content.find(struct.pack("<Q", len(first)) + first)
    infos_end = infos_at
    for _ in header.tensors:
        infos_end += 8 + struct.unpack_from("<Q", content, infos_end)[0]
        infos_end += 4 + 8 * struct.unpack_from("<I", content, infos_end)[0] + 12
    data_at = min(info.offset for info in header.tensors.values())
    stored = [_text(key) + _stored(value) for key, value in entries]
    counts = content[8:16] + struct.pack("<Q", len(stored))
    front = content[:8] + counts + b"".join(stored) + content[infos_at:infos_end]
    out.write_bytes(_padded(front) + content[data_at:])
    return out


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _stored(value: Any) -> bytes:
    """A value, preceded by its type."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, list):
        kind, each = _form(value)
        return struct.pack("<I", kind) + each(value)
    kinds = [_form(item) for item in value] or [_form(0)]
    # All items of an array have one type: the one of floats, if there is any.
    kind, each = max(kinds, key=lambda one: (one[0] in _FLOATS, one[0]))
    front = struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, kind, len(value))
    return front + b"".join(each(item) for item in value)


_FLOATS = (gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.FLOAT64)


def _form(value: Any) -> tuple[gguf.GGUFValueType, Callable[[Any], bytes]]:
    kinds = gguf.GGUFValueType
    match value:
        case bool():
            return kinds.BOOL, lambda one: struct.pack("<?", one)
        case int() if 0 <= value < 2**32:
            return kinds.UINT32, lambda one: struct.pack("<I", one)
        case int() if -(2**31) <= value < 0:
            return kinds.INT32, lambda one: struct.pack("<i", one)
        case int():
            return kinds.INT64, lambda one: struct.pack("<q", one)
        case float():
            return kinds.FLOAT64, lambda one: struct.pack("<d", one)
        case str():
            return kinds.STRING, _text
    raise TypeError(f"a GGUF file holds no {type(value).__name__}")


@cache
def _names(architecture: str, num_layers: int) -> Any:
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(kinds[architecture], num_layers)


def _layer_of(name: str) -> int:
    """A tensor's layer; -1 if it belongs to none."""
    return int(name.split(".")[1]) if name.startswith("blk.") else -1


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 32)


def known_name(name: str, architecture: str, num_layers: int) -> str:
    """The GGUF name of a checkpoint's tensor in gguf's own table."""
    found = _names(architecture, num_layers).get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def with_tokenizer(path: Path, count: int) -> Path:
    """Add a vocabulary of so many tokens to a file."""
    words = ["<unk>", "<s>", "</s>", *(f"\u2581w{n}" for n in range(count - 3))]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(words)
        writer.add_token_scores([float(-n) for n in range(count)])
        writer.add_token_types([2, 3, 3, *[1] * (count - 3)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    return _rewritten(path, add)


def with_vocabulary(path: Path, tokenizer: Any) -> Path:
    """Add the vocabulary and chat template of a tokenizer of bytes, without merges, to a file."""
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    controls = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    kinds = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(words)
        writer.add_token_types([kinds[word in controls] for word in words])
        writer.add_eos_token_id(tokenizer.eos_token_id)
        writer.add_add_bos_token(False)
        writer.add_chat_template(tokenizer.chat_template)

    return _rewritten(path, add)


def _rewritten(path: Path, add: Callable[[gguf.GGUFWriter], None]) -> Path:
    """Write a file again, with what `add` adds."""
    reader = gguf.GGUFReader(path)
    label = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path.with_suffix(".new"), label)
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture", "tokenizer.")):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    add(writer)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_suffix(".new").replace(path)
