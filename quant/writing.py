"""Fills a model folder's tensors: rounded one at a time, or calibrated layer by layer."""

from __future__ import annotations

import math
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from appliance.errors import QuantizeError
from appliance.kernels.fp8 import BLOCK, Fp8Weight
from appliance.kernels.packed import PackedWeight
from appliance.quant import data_free
from appliance.quant.calibrated import quantize_layers
from appliance.quant.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor

    from appliance.kernels.weight import Weight
    from appliance.model.source import ModelSource
    from appliance.quant.calibration import Calibration
    from appliance.quant.formats import WeightReader
    from appliance.quant.options import Method
    from appliance.quant.plan import PlannedTensor, QuantizePlan
    from appliance.quant.shard_writer import ShardWriter

PIECE_ELEMENTS = 1 << 18  # numbers of a weight that are worked on at once: 1 MiB in float32


class OnProgress(Protocol):
    """What wants to know how far the work is."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Done and total are bytes of the result."""


def write_rounded(
    weights: WeightReader,
    plan: QuantizePlan,
    writer: ShardWriter,
    method: Method,
    on_progress: OnProgress | None,
) -> None:
    """Quantize every weight by itself; see `data_free`."""
    done = 0
    with _workers() as workers:
        for tensor in plan.tensors:
            weight = weights.load(tensor.name)
            if tensor.scheme is None:
                writer.write(tensor.name, _in_type(plan.dtype, tensor.name, weight))
            else:
                done_weight = _quantized(workers, tensor, method, plan.dtype, weight)
                for name, stored in plan.encode(tensor, done_weight).items():
                    writer.write(name, [stored])
            done += tensor.nbytes
            if on_progress is not None:
                on_progress("quantizing", done, writer.total_bytes)


def write_calibrated(
    source: ModelSource,
    plan: QuantizePlan,
    writer: ShardWriter,
    method: Method,
    calibration: Calibration,
    on_progress: OnProgress | None,
) -> None:
    """Quantize layer by layer with calibration rows; what is in no layer is written as it is."""
    planned = {tensor.name: tensor for tensor in plan.tensors}
    schemes = {tensor.name: tensor.scheme for tensor in plan.tensors}
    done = 0

    def write(tensor: PlannedTensor, value: Weight) -> None:
        nonlocal done
        if tensor.scheme is None:
            writer.write(tensor.name, _in_type(plan.dtype, tensor.name, value))
        else:
            assert not isinstance(value, Tensor), tensor.name
            for name, stored in plan.encode(tensor, value).items():
                writer.write(name, [stored])
        done += tensor.nbytes
        if on_progress is not None:
            on_progress("quantizing", done, writer.total_bytes)

    with tempfile.TemporaryDirectory(dir=writer.folder.parent, prefix=".calibration-") as folder:
        walk = Walk(source, calibration.rows, Path(folder) / "stream", torch.device("cpu"))
        for layer in quantize_layers(source, walk, method, schemes, plan.dtype):
            for name, part in layer.tensors.items():
                write(planned.pop(name), part)
    for name, tensor in planned.items():  # embedding, head, norms that nothing was folded into
        value = source.weights.load(name)
        if tensor.scheme is not None:
            with _workers() as workers:
                value = _quantized(workers, tensor, method, plan.dtype, value)
        write(tensor, value)


def _in_type(dtype: torch.dtype, name: str, weight: Weight) -> Iterator[Tensor]:
    """The rows of a weight that is not quantized, piece by piece."""
    for rows in _row_ranges(weight.shape):
        yield _read_rows(name, weight, rows).to(dtype)


def _quantized(
    workers: Executor,
    tensor: PlannedTensor,
    method: Method,
    scale_dtype: torch.dtype,
    weight: Weight,
) -> PackedWeight | Fp8Weight:
    scheme = tensor.scheme
    assert scheme is not None, tensor.name

    def quantize_rows(rows: slice) -> PackedWeight | Fp8Weight:
        piece = _read_rows(tensor.name, weight, rows)
        return data_free.quantize(piece, scheme, method, scale_dtype)

    return data_free.concatenate(list(workers.map(quantize_rows, _row_ranges(weight.shape))))


def _read_rows(name: str, weight: Weight, rows: slice) -> Tensor:
    """Some rows of a weight in float32; packed ones are dequantized.

    Raises:
        QuantizeError: they hold NaN or infinity.
    """
    if isinstance(weight, PackedWeight):
        piece = weight.rows(rows).dequantize()
    elif isinstance(weight, Fp8Weight):
        piece = weight.dequantize(rows=rows)
    else:
        piece = weight[rows].to(torch.float32)
    if not torch.isfinite(piece).all():
        raise QuantizeError(f"{name} holds NaN or infinity; fetch the model again")
    return piece


def _row_ranges(shape: tuple[int, ...]) -> list[slice]:
    """Cut a tensor along its first dimension into pieces to work on at once.

    Whole blocks of FP8, so that a piece may be quantized by itself.
    """
    rows = max(BLOCK, PIECE_ELEMENTS // math.prod(shape[1:]) // BLOCK * BLOCK)
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
