"""The type of each matrix in files of llama.cpp's mixtures of types, such as Q4_K_M.

The rules are those of llama.cpp's src/llama-quant.cpp for a dense model of Llama's layers whose
embedding and head are one matrix, without an importance matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
from gguf.quants import dequantize

from appliance.model.source import open_model
from appliance.model.tensors import Role
from appliance.quant.gguf.tensors import FileSettings, file_tensors
from bench.lib.llama_functions import library, quantize

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.model.tensors import TensorSlot

_MOST = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}  # other names are the type itself
_ENDS = {"Q4_K_M": "Q6_K", "Q5_K_M": "Q6_K", "IQ4_XS": "Q6_K"}
# Types of matrices whose rows are not a multiple of a super-block.
_NARROW = {
    **dict.fromkeys(("Q2_K", "Q3_K", "IQ4_XS"), "IQ4_NL"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}


def type_in(file_type: str, slot: TensorSlot, num_layers: int) -> str:
    """Return the type of a matrix."""
    found = _in_wide(file_type, slot, num_layers)
    return _NARROW.get(found, found) if slot.shape[1] % 256 else found


def _in_wide(file_type: str, slot: TensorSlot, num_layers: int) -> str:
    if slot.layer is None:
        return _ENDS.get(file_type, file_type)
    eighth = num_layers // 8
    if file_type in _MOST and slot.role in (Role.VALUE, Role.DOWN):
        in_middle = eighth <= slot.layer < 7 * num_layers // 8
        if not in_middle or (slot.layer - eighth) % 3 == 2:
            return "Q6_K"
    early = slot.role is Role.DOWN and slot.layer < eighth
    shared = slot.role is Role.VALUE and 4 * slot.shape[0] <= slot.shape[1]  # by four heads or more
    if file_type == "IQ4_XS" and (early or shared):
        return "Q5_K"
    return _MOST.get(file_type, file_type)


def write_in_types(model: Path, out: Path, file_type: str, peer: Path, threads: int) -> None:
    """Write a model's file in other types, with the codes that llama.cpp chooses.

    Args:
        peer: has the package xllamacpp.
    """
    source, llama = open_model(model), library(peer)
    settings = FileSettings.of_file(model)
    slots = {one.name: one.slot for one in file_tensors(source)}
    writer = gguf.GGUFWriter(out, settings.architecture)
    for one in settings.settings:
        writer.add_key_value(one.key, one.value, one.kind, sub_type=one.inner)
    for tensor in gguf.GGUFReader(model).tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        name = type_in(file_type, slots[tensor.name], len(source.spec.layers))
        kind = gguf.GGMLQuantizationType[name]
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
        codes = quantize(llama, values, kind, values.shape[1] // size * nbytes, threads)
        writer.add_tensor(tensor.name, codes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
