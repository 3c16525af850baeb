"""Writes a quantized folder as one GGUF file with the same codes.

Settings and tokenizer come from a GGUF file of the same model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.errors import QuantizeError
from appliance.files import flush
from appliance.gguf import GGUFFile
from appliance.kernels.packed import PackedWeight
from appliance.kernels.weight import dense
from appliance.model.linear import halves_from_pairs
from appliance.model.source import open_model
from appliance.model.tensors import Role, tensor_slots
from appliance.quant.formats.ggml_blocks import block_type, encode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import gguf
    import numpy as np
    from numpy.typing import NDArray

    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot

# Part of the file's own header, or not true of other weights.
_OWN = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


@dataclass(frozen=True, slots=True)
class GGUFWritten:
    """The number of weights per type, and one line per difference from the folder."""

    types: dict[str, int]
    notes: tuple[str, ...]


def write_gguf(
    model_path: Path,
    base_path: Path,
    out: Path,
    *,
    overwrite: bool = False,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> GGUFWritten:
    """Write a quantized model as a GGUF file for llama.cpp.

    Symmetric 4-bit codes become Q4_0 and 8-bit codes Q8_0, both without loss (scales as in
    `exact_enough`); 4-bit codes with zero points become Q4_1, whose minima are rounded to 16 bits.
    Unquantized tensors keep their values as BF16, F16 or F32.

    Args:
        model_path: a folder that `appliance quantize` wrote.
        base_path: a GGUF file of the unquantized model, for settings and tokenizer; its weights are
            not read.
        out: the file; replaced only when the new one is complete.
        on_progress: called with a stage, the number of weights done, and their total.

    Raises:
        QuantizeError: the models differ, or GGUF cannot hold a weight.
    """
    report = on_progress or (lambda stage, done, total: None)
    if out.exists() and not overwrite:
        raise QuantizeError(f"{out} exists; choose another file, or replace it with --overwrite")
    if not base_path.is_file():
        raise QuantizeError(f"--base {base_path} is no GGUF file; give one of the same model")
    source, base, base_file = open_model(model_path), open_model(base_path), GGUFFile(base_path)
    pairs = _pairs(source, base, base_file)
    partial = out.with_name(f".{out.name}.partial")
    try:
        written = _write(source, base_file, pairs, partial, report)
        flush(partial)
        partial.replace(out)
    except OSError as error:
        raise QuantizeError(
            f"cannot write {out}: {error.strerror}; nothing was left there"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return written


def _pairs(
    source: ModelSource, base: ModelSource, base_file: GGUFFile
) -> list[tuple[TensorSlot, str]]:
    """Return the folder's tensors with GGUF names; raise QuantizeError if the base does not fit."""
    mapping = base.family.gguf
    assert mapping is not None, "it was read"
    if source.family.name != base.family.name:
        raise QuantizeError(
            f"--base {base.path} is a {base.family.name} model, {source.path} is"
            f" {source.family.name}; give a GGUF file of the same model"
        )
    if source.spec.has_experts or source.spec.state_bytes:
        raise QuantizeError(
            f"{source.path} has experts or recurrent layers, whose tensors are not written as GGUF;"
            " keep the folder"
        )
    ours = tensor_slots(source.spec, source.family.names)
    theirs = tensor_slots(base.spec, mapping.names)
    shapes = [slot.shape for slot in ours]
    if shapes != [slot.shape for slot in theirs]:
        raise QuantizeError(
            f"--base {base.path} has tensors of other shapes than {source.path}; give a GGUF file"
            " of the same model"
        )
    stored = set(source.weights.tensor_names())
    return [
        (slot, named.name) for slot, named in zip(ours, theirs, strict=True) if slot.name in stored
    ]


def _write(
    source: ModelSource,
    base: GGUFFile,
    pairs: list[tuple[TensorSlot, str]],
    path: Path,
    report: Callable[[str, int, int], None],
) -> GGUFWritten:
    import gguf

    reader = gguf.GGUFReader(base.path)
    writer = gguf.GGUFWriter(path, base.metadata["general.architecture"])
    _copy_settings(reader, writer)
    mapping = source.family.gguf
    assert mapping is not None
    types: Counter[str] = Counter()
    rounded = False
    kinds: dict[str, str] = {}
    for index, (slot, name) in enumerate(pairs):  # the header comes before all data
        report("looking", index, len(pairs))
        weight = source.weights.load(slot.name)
        kind = block_type(slot.name, weight) if isinstance(weight, PackedWeight) else _plain(weight)
        kinds[name] = kind
        types[kind] += 1
        rounded |= kind == "Q4_1"
        _announce(writer, name, tuple(weight.shape), kind)
    extra = [tensor for tensor in reader.tensors if tensor.name.startswith("rope_")]
    for tensor in extra:
        _announce(writer, tensor.name, tuple(int(n) for n in tensor.shape[::-1]), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for index, (slot, name) in enumerate(pairs):
        report("writing", index, len(pairs))
        weight = source.weights.load(slot.name)
        order = _stored_order(source, slot, interleaved=mapping.interleaved_rope)
        if isinstance(weight, PackedWeight):
            packed = weight if order is None else weight.rows(order)
            data = encode(slot.name, packed, kinds[name])
        else:
            values = dense(weight, torch.float32)
            values = values if order is None else values[order]
            if slot.role is Role.NORM:
                values = values + mapping.norm_shift
            data = _stored(values, kinds[name])
        writer.write_tensor_data(data.contiguous().numpy())
    for tensor in extra:
        writer.write_tensor_data(tensor.data)
    writer.close()
    notes = ("minima of zero points are rounded to 16 bits in Q4_1",) if rounded else ()
    return GGUFWritten(dict(types), notes)


def _copy_settings(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    from gguf import GGUFValueType

    for field in reader.fields.values():
        if field.name.startswith(_OWN):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    writer.add_quantization_version(2)


def _plain(weight: object) -> str:
    """Return an unquantized tensor's type: F32 for vectors, 16 bits kept for matrices."""
    assert isinstance(weight, Tensor), "no other form is written by quantize"
    if weight.dim() < 2:
        return "F32"
    return {torch.bfloat16: "BF16", torch.float16: "F16"}.get(weight.dtype, "F32")


def _announce(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: str) -> None:
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    number = GGMLQuantizationType[kind]
    size, nbytes = GGML_QUANT_SIZES[number]
    stored = (*shape[:-1], shape[-1] // size * nbytes)
    total = int(np.prod(stored))
    writer.add_tensor_info(name, stored, np.dtype(np.uint8), total, raw_dtype=number)


def _stored(values: Tensor, kind: str) -> Tensor:
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[kind]
    return values.to(dtype).contiguous().view(torch.uint8)


def _stored_order(
    source: ModelSource, slot: TensorSlot, *, interleaved: bool
) -> NDArray[np.int64] | None:
    """Return the row of ours at each stored row; None if the order is the same."""
    if slot.role not in (Role.QUERY, Role.KEY) or not interleaved:
        return None
    assert slot.layer is not None
    head_dim = source.spec.attention_layers[slot.layer].head_dim
    return halves_from_pairs(slot.shape[0], head_dim).argsort()
