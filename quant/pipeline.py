"""Quantizes a model into a folder, one tensor in memory at a time.

source -> plan -> for each tensor: read, quantize, write -> rename. Nothing of the result exists
under its own name before all of it does.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from appliance.checkpoint import CONFIG_NAME
from appliance.errors import ConfigError, QuantizeError
from appliance.files import read_json
from appliance.gguf import GGUFFile
from appliance.kernels.packed import PackedWeight
from appliance.model.source import open_model
from appliance.quant import rtn
from appliance.quant.formats.compressed_tensors import encode
from appliance.quant.plan import make_plan
from appliance.quant.report import QuantizeReport
from appliance.quant.shard_writer import ShardWriter
from appliance.quant.staging import check_destination, staged_folder
from appliance.quant.tokenizer_files import write_tokenizer_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor
    from pathlib import Path

    from appliance.model.source import ModelSource
    from appliance.quant.formats import WeightReader
    from appliance.quant.plan import QuantizePlan
    from appliance.quant.scheme import WeightScheme

MAX_SHARD_BYTES = 4 << 30
PIECE_ELEMENTS = 1 << 18  # numbers of a weight that are worked on at once: 1 MiB in float32


class Method(Enum):
    """How the codes of a weight are chosen."""

    RTN = "rtn"


class OnProgress(Protocol):
    """What wants to know how far the work is."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Done and total are bytes of the result."""


def quantize_model(
    model_path: Path,
    out: Path,
    scheme: WeightScheme,
    *,
    method: str = Method.RTN.value,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> QuantizeReport:
    """Quantize the linear weights of a model's layers and write it as a model folder.

    Args:
        model_path: a .gguf file, or a folder with config.json and safetensors.
        out: the folder to write; compressed-tensors weights, config and tokenizer.
        scheme: a weight whose width it does not divide gets a smaller group, which is noted.
        method: "rtn".
        overwrite: replace an older model folder at `out`.
        on_progress: called after every tensor.
        max_shard_bytes: where a new safetensors file begins.

    Raises:
        ConfigError: no such method.
        CheckpointError: the model is damaged or incomplete.
        UnsupportedModelError: no code here reads this model.
        QuantizeError: the destination is taken, the disk is full, a weight is not finite or the
            model is quantized already. No part of `out` is left behind.
    """
    started = time.monotonic()
    chosen = _known_method(method)
    out = out.resolve()
    try:
        check_destination(out, model_path.resolve(), overwrite=overwrite)
        _refuse_quantized(model_path)
        source = open_model(model_path)
        plan = make_plan(source.slots(), scheme, _stored_dtype(source))
        _check_space(out, plan)
        with staged_folder(out) as staging:
            with ShardWriter(staging, plan.layouts(), max_shard_bytes) as writer:
                _write_tensors(source.weights, plan, writer, on_progress)
            config = json.dumps(plan.model_config(source.config), indent=2, ensure_ascii=False)
            (staging / CONFIG_NAME).write_text(config + "\n", encoding="utf-8")
            write_tokenizer_files(model_path, staging)
    except OSError as error:
        raise QuantizeError(
            f"cannot write {out}: {error.strerror}; nothing was left there"
        ) from error
    quantized = [tensor for tensor in plan.tensors if tensor.scheme is not None]
    return QuantizeReport(
        out=out,
        architecture=source.spec.architecture,
        method=chosen.value,
        scheme=scheme,
        num_quantized=len(quantized),
        quantized_parameters=sum(math.prod(tensor.shape) for tensor in quantized),
        quantized_bytes=sum(tensor.nbytes for tensor in quantized),
        parameters=sum(math.prod(tensor.shape) for tensor in plan.tensors),
        weight_bytes=sum(tensor.nbytes for tensor in plan.tensors),
        seconds=time.monotonic() - started,
        notes=(*_notes(model_path, scheme), *plan.notes),
    )


def _write_tensors(
    weights: WeightReader,
    plan: QuantizePlan,
    writer: ShardWriter,
    on_progress: OnProgress | None,
) -> None:
    done = 0
    with _workers() as workers:
        for tensor in plan.tensors:
            weight = weights.load(tensor.name)
            if tensor.scheme is None:
                writer.write(tensor.name, _in_type(plan.dtype, tensor.name, weight))
            else:
                packed = _quantized(workers, tensor.scheme, plan.dtype, tensor.name, weight)
                for name, stored in encode(tensor.name, packed).items():
                    writer.write(name, [stored])
            done += tensor.nbytes
            if on_progress is not None:
                on_progress("quantizing", done, writer.total_bytes)


def _in_type(dtype: torch.dtype, name: str, weight: Tensor | PackedWeight) -> Iterator[Tensor]:
    """The rows of a weight that is not quantized, piece by piece."""
    for rows in _row_ranges(weight.shape):
        yield _read_rows(name, weight, rows).to(dtype)


def _quantized(
    workers: Executor,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    name: str,
    weight: Tensor | PackedWeight,
) -> PackedWeight:
    def quantize_rows(rows: slice) -> PackedWeight:
        return rtn.quantize(_read_rows(name, weight, rows), scheme, scale_dtype)

    return PackedWeight.concatenate(list(workers.map(quantize_rows, _row_ranges(weight.shape))))


def _read_rows(name: str, weight: Tensor | PackedWeight, rows: slice) -> Tensor:
    """Some rows of a weight in float32; packed ones are dequantized.

    Raises:
        QuantizeError: they hold NaN or infinity.
    """
    if isinstance(weight, PackedWeight):
        piece = weight.rows(rows).dequantize()
    else:
        piece = weight[rows].to(torch.float32)
    if not torch.isfinite(piece).all():
        raise QuantizeError(f"{name} holds NaN or infinity; fetch the model again")
    return piece


def _row_ranges(shape: tuple[int, ...]) -> list[slice]:
    """Cut a tensor along its first dimension into pieces to work on at once."""
    rows = max(1, PIECE_ELEMENTS // math.prod(shape[1:]))
    return [slice(start, start + rows) for start in range(0, shape[0], rows)]


@contextmanager
def _workers() -> Iterator[Executor]:
    """Threads that share the cores by pieces of a weight, with torch on one core in each.

    Torch's own threads wait for each other after every operation, which takes ten times as long
    as the work itself where another program uses the cores too.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as workers:
            yield workers
    finally:
        torch.set_num_threads(threads)


def _known_method(name: str) -> Method:
    try:
        return Method(name)
    except ValueError as error:
        known = ", ".join(method.value for method in Method)
        raise ConfigError(f"method {name!r} is not known; supported: {known}") from error


def _refuse_quantized(model_path: Path) -> None:
    if not model_path.is_dir():
        return
    config = read_json(model_path / CONFIG_NAME).get("quantization_config")
    if config is not None:
        method = config.get("quant_method") if isinstance(config, dict) else config
        raise QuantizeError(
            f"{model_path} is quantized already, with {method!r}; quantize the 16-bit model that"
            " it was made from"
        )


def _stored_dtype(source: ModelSource) -> torch.dtype:
    """float16 where the model is, else bfloat16, whose range holds any model's weights."""
    dtype = source.config.get("dtype", source.config.get("torch_dtype"))
    return torch.float16 if dtype == "float16" else torch.bfloat16


def _check_space(out: Path, plan: QuantizePlan) -> None:
    needed = sum(tensor.nbytes for tensor in plan.tensors)
    place = next(folder for folder in out.parents if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise QuantizeError(
            f"the result needs {needed / 2**20:,.0f} MiB, but {place} has"
            f" {free / 2**20:,.0f} MiB free; make room or choose another --out"
        )


def _notes(model_path: Path, scheme: WeightScheme) -> Iterator[str]:
    if model_path.is_file():
        file = GGUFFile(model_path)
        types = {file.type_name(n) for n in file.tensor_names() if len(file.shape(n)) == 2}
        lossy = sorted(types - {"F32", "F16", "BF16"})
        if lossy:
            yield (
                f"re-quantized from {', '.join(lossy)}, so the losses of both add up;"
                " the 16-bit model it was made from gives a better result"
            )
    if not scheme.symmetric:
        yield ("transformers loads zero points only with CompressedTensorsConfig(dequantize=True)")
