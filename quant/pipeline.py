"""Quantizes a model into a folder, one tensor in memory at a time.

source -> plan -> for each tensor: read, quantize, write -> rename. Nothing of the result exists
under its own name before all of it does.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from typing import TYPE_CHECKING

import torch

from appliance.checkpoint import CONFIG_NAME
from appliance.errors import QuantizeError
from appliance.files import read_json
from appliance.gguf import GGUFFile
from appliance.model.source import open_model
from appliance.quant.calibration import CalibrationText
from appliance.quant.kv_files import (
    calibrate_kv_cache,
    kv_scale_layouts,
    with_kv_scheme,
    write_kv_scales,
)
from appliance.quant.options import QuantizeOptions
from appliance.quant.plan import make_plan
from appliance.quant.report import QuantizeReport
from appliance.quant.shard_writer import ShardWriter
from appliance.quant.staging import check_destination, staged_folder
from appliance.quant.tokenizer_files import write_tokenizer_files
from appliance.quant.writing import write_calibrated, write_rounded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from appliance.model.source import ModelSource
    from appliance.quant.calibration import Calibration
    from appliance.quant.plan import QuantizePlan
    from appliance.quant.scheme import WeightScheme
    from appliance.quant.writing import OnProgress


def quantize_model(
    model_path: Path,
    out: Path,
    options: QuantizeOptions | None = None,
    on_progress: OnProgress | None = None,
) -> QuantizeReport:
    """Quantize the linear weights of a model's layers and write it as a model folder.

    Args:
        model_path: a .gguf file, or a folder with config.json and safetensors.
        out: the folder to write; compressed-tensors weights, config and tokenizer.
        options: what is asked for; 4 bits by rounding by default.
        on_progress: called after every tensor.

    Raises:
        CheckpointError: the model is damaged or incomplete.
        UnsupportedModelError: no code here reads this model.
        QuantizeError: the destination is taken, the disk is full, a weight is not finite or the
            model is quantized already. No part of `out` is left behind.
    """
    started = time.monotonic()
    options = options or QuantizeOptions()
    method = options.method
    out = out.resolve()
    try:
        check_destination(out, model_path.resolve(), overwrite=options.overwrite)
        _refuse_quantized(model_path)
        source = open_model(model_path)
        plan = make_plan(source.slots(), options.scheme, _stored_dtype(source))
        _check_space(out, plan)
        calibration = None
        if method.needs_text or options.kv_bits is not None:
            calibration = (options.text or CalibrationText()).rows_of(model_path)
        with staged_folder(out) as staging:
            kv = None
            if options.kv_bits is not None:
                assert calibration is not None
                kv = calibrate_kv_cache(source, calibration, staging, options.kv_bits)
            layouts = [*plan.layouts(), *kv_scale_layouts(source, kv)]
            with ShardWriter(staging, layouts, options.max_shard_bytes) as writer:
                if calibration is None or not method.needs_text:
                    write_rounded(source.weights, plan, writer, on_progress)
                else:
                    write_calibrated(source, plan, writer, method, calibration, on_progress)
                write_kv_scales(source, kv, writer)
            config_json = with_kv_scheme(plan.model_config(source.config), kv)
            config = json.dumps(config_json, indent=2, ensure_ascii=False)
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
        method=method.value,
        scheme=options.scheme,
        num_quantized=len(quantized),
        quantized_parameters=sum(math.prod(tensor.shape) for tensor in quantized),
        quantized_bytes=sum(tensor.nbytes for tensor in quantized),
        parameters=sum(math.prod(tensor.shape) for tensor in plan.tensors),
        weight_bytes=sum(tensor.nbytes for tensor in plan.tensors),
        seconds=time.monotonic() - started,
        notes=(
            *([] if kv is None else [str(kv)]),
            *_notes(model_path, options.scheme, calibration),
            *plan.notes,
        ),
    )


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


def _notes(
    model_path: Path, scheme: WeightScheme, calibration: Calibration | None
) -> Iterator[str]:
    if calibration is not None:
        yield str(calibration)
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
