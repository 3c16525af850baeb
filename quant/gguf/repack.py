"""Writes a quantized folder as one GGUF file with the same codes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.errors import QuantizeError
from appliance.files import flush
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.trellis import TrellisWeight
from appliance.kernels.weights.weight import dense
from appliance.model.source import open_model
from appliance.quant.formats.ggml_blocks import block_type, encode, row_bytes
from appliance.quant.gguf.file_writer import GGUFFileWriter, PlannedFile, TypedTensor
from appliance.quant.gguf.from_checkpoint import check_as_read, settings_of
from appliance.quant.gguf.projector import projector_of
from appliance.quant.gguf.tensors import FileSettings, file_tensors, mapping_of
from appliance.quant.run.shard_writer import TensorLayout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.model.source import ModelSource
    from appliance.quant.gguf.tensors import FileTensor

_KINDS: dict[type, str] = {TrellisWeight: "symbols of a trellis", GgmlWeight: "blocks of GGUF"}


@dataclass(frozen=True, slots=True)
class GGUFWritten:
    """The number of weights per type, and one line per difference from the folder."""

    types: dict[str, int]
    notes: tuple[str, ...]


def write_gguf(
    model_path: Path,
    out: Path,
    base_path: Path | None = None,
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
        out: the file; replaced only when the new one is complete.
        base_path: a GGUF file of the unquantized model, for settings and tokenizer; its weights are
            not read. None: the folder's own.
        on_progress: called with a stage, the number of weights done, and their total.

    Raises:
        QuantizeError: the models differ, or GGUF cannot hold a weight or a setting.
    """
    report = on_progress or (lambda stage, done, total: None)
    if out.exists() and not overwrite:
        raise QuantizeError(f"{out} exists; choose another file, or replace it with --overwrite")
    if base_path is not None and not base_path.is_file():
        raise QuantizeError(f"--base {base_path} is no GGUF file; give one of the same model")
    source = open_model(model_path)
    if base_path is not None:
        _check_base(source, open_model(base_path))
    partial = out.with_name(f".{out.name}.partial")
    try:
        written = _write(source, base_path, partial, out, report)
        flush(partial)
        partial.replace(out)
    except OSError as error:
        raise QuantizeError(
            f"cannot write {out}: {error.strerror}; nothing was left there"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return written


def _check_base(source: ModelSource, base: ModelSource) -> None:
    ours, theirs = mapping_of(source.family), mapping_of(base.family)
    if ours is None or theirs is None or ours.architecture != theirs.architecture:
        raise QuantizeError(
            f"--base {base.path} is a {base.family.name} model, {source.path} is"
            f" {source.family.name}; give a GGUF file of the same model"
        )
    if [slot.shape for slot in source.slots()] != [slot.shape for slot in base.slots()]:
        raise QuantizeError(
            f"--base {base.path} has tensors of other shapes than {source.path}; give a GGUF file"
            " of the same model"
        )


def _write(
    source: ModelSource,
    base_path: Path | None,
    path: Path,
    out: Path,
    report: Callable[[str, int, int], None],
) -> GGUFWritten:
    tensors = file_tensors(source)
    planned: list[TypedTensor] = []
    for index, tensor in enumerate(tensors):  # the header comes before all data
        report("looking", index, len(tensors))
        planned.append(_planned(source, tensor))
    if base_path is None:
        settings = settings_of(source)
        check_as_read(source, settings, planned)
    else:
        settings = FileSettings.of_file(base_path)
    text = PlannedFile.of(settings, planned)
    projector, notes = projector_of(source, text)
    with GGUFFileWriter(path, text) as file:
        for index, one in enumerate(planned):
            report("writing", index, len(planned))
            name = one.layout.name
            weight = source.weights.load(name)
            if isinstance(weight, PackedWeight):
                values = encode(name, weight, one.type_name)
            else:
                values = dense(weight, one.layout.dtype)
            file.write(name, [values])
    types = Counter(one.type_name for one in planned)
    if projector is not None:
        projector.write(out)
    if types["Q4_1"]:
        notes += ("minima of zero points are rounded to 16 bits in Q4_1",)
    return GGUFWritten(dict(types), notes)


def _planned(source: ModelSource, tensor: FileTensor) -> TypedTensor:
    """Choose a tensor's type: F32 for vectors, 16 bits kept for other unquantized ones."""
    name, shape = tensor.slot.name, tensor.slot.shape
    weight = source.weights.load(name)
    if isinstance(weight, PackedWeight):
        kind = block_type(name, weight)
        layout = TensorLayout(name, torch.uint8, (shape[0], row_bytes(kind, shape[1])))
        return TypedTensor(tensor, kind, layout)
    if not isinstance(weight, Tensor):
        what = _KINDS.get(type(weight), "floating-point codes")
        raise QuantizeError(
            f"{name} has {what}, which is not stored anew without loss; quantize the 16-bit model"
            " that it was made from with --format gguf, or unpack this one first with appliance"
            " repack --format dense"
        )
    keeps = len(shape) > 1 and weight.dtype in (torch.bfloat16, torch.float16)
    dtype = weight.dtype if keeps else torch.float32
    return TypedTensor.plain(tensor, TensorLayout(name, dtype, shape))
