"""Runs another project's quantizer, imported only on request: AutoAWQ or Optimum.

Its failures become one clear error.
"""

from __future__ import annotations

import math
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

import torch

from appliance.errors import ConfigError, QuantizeError
from appliance.kernels.arrays import numpy_dtype
from appliance.model.source import open_model
from appliance.model_files.checkpoint import SafetensorsFolder
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.run.options import Method, QuantizeLibrary, WeightFormat
from appliance.quant.run.run import QuantizeReport
from appliance.quant.run.staging import check_destination, staged_folder
from appliance.quant.run.tokenizer_files import write_tokenizer_files
from appliance.quant.text.calibration import CalibrationText

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from appliance.quant.run.options import QuantizeOptions


class Library(Protocol):
    """Another project's quantizer.

    Attributes:
        method: the only one that it has.
        format: the only one that it writes.
        tried: versions that were tried, in words.
    """

    method: Method
    format: WeightFormat
    tried: str

    def installed(self) -> str:
        """Return the library's version, or raise ImportError."""
        ...

    def quantize(self, model_path: Path, out: Path, scheme: WeightScheme, rows: Tensor) -> None:
        """Write the quantized model into an empty folder."""
        ...


class AutoAWQ:
    """The AutoAWQ library."""

    method, format = Method.AWQ, WeightFormat.AWQ
    # Found in a trial run; the package is archived, so this will not change.
    tried = (
        "autoawq 0.2.9, its last release, worked with transformers 5.23 and torch 2.13, with"
        " datasets and zstandard beside it; with transformers 4.57.6 it cannot be imported"
    )

    def installed(self) -> str:
        """Return the library's version, or raise ImportError."""
        import awq  # noqa: F401 - it fails to import with some versions of transformers

        return version("autoawq")

    def quantize(self, model_path: Path, out: Path, scheme: WeightScheme, rows: Tensor) -> None:
        """Quantize a Hugging Face folder into an AWQ folder.

        Args:
            model_path: folder of the 16-bit model.
            scheme: 4 bits, asymmetric, in groups.
            rows: (num_rows, row_tokens) int64 calibration tokens.
        """
        from awq import AutoAWQForCausalLM

        model: Any = AutoAWQForCausalLM.from_pretrained(
            str(model_path), device_map="cpu" if not torch.cuda.is_available() else None
        )
        model.quantize(
            None,
            quant_config={
                "zero_point": True,
                "q_group_size": scheme.group_size,
                "w_bit": scheme.bits,
                "version": "GEMM",
            },
            calib_data=rows.tolist(),
            max_calib_samples=rows.shape[0],
            max_calib_seq_len=rows.shape[1],
        )
        model.save_quantized(str(out))


class Optimum:
    """The Optimum library, which calls GPTQModel."""

    method, format = Method.GPTQ, WeightFormat.GPTQ
    tried = (
        "optimum 2.3.0 quantizes by gptqmodel 7 only: of that, 7.7.0 needs torch 2.14.1 or newer,"
        " and 7.5.0 fails on two processors"
    )

    def installed(self) -> str:
        """Return the versions of both libraries, or raise ImportError."""
        import gptqmodel  # noqa: F401 - optimum imports without it and fails later
        import optimum.gptq  # noqa: F401

        return f"{version('optimum')} with gptqmodel {version('gptqmodel')}"

    def quantize(self, model_path: Path, out: Path, scheme: WeightScheme, rows: Tensor) -> None:
        """Quantize a Hugging Face folder into a GPTQ folder.

        Args:
            model_path: folder of the 16-bit model.
            scheme: 4 or 8 bits.
            rows: (num_rows, row_tokens) int64 calibration tokens.
        """
        from optimum.gptq import GPTQQuantizer
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float16)
        quantizer: Any = GPTQQuantizer(
            bits=scheme.bits,
            dataset=[
                {"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]}
                for row in rows
            ],
            group_size=scheme.group_size or -1,
            sym=scheme.symmetric,
            desc_act=False,
            model_seqlen=rows.shape[1],
        )
        quantizer.save(quantizer.quantize_model(model, None), str(out))


LIBRARIES: dict[QuantizeLibrary, Library] = {
    QuantizeLibrary.AUTOAWQ: AutoAWQ(),
    QuantizeLibrary.OPTIMUM: Optimum(),
}


def quantize_by_engine(model_path: Path, out: Path, options: QuantizeOptions) -> QuantizeReport:
    """Quantize a Hugging Face folder with another library, in its own format.

    Raises:
        ConfigError: the library does not support these options.
        QuantizeError: the library is not installed or failed; `out` is removed.
    """
    started = time.monotonic()
    engine, library = options.engine, LIBRARIES[options.engine]
    method, scheme = library.method, _check(options)
    instead = f"use --method {method.value} --format {library.format.value}, which needs no library"
    try:
        release = library.installed()
    except ImportError as error:
        raise QuantizeError(
            f"--engine {engine.value} cannot be imported ({error}); {library.tried}; {instead}"
        ) from error
    if not model_path.is_dir():
        raise ConfigError(
            f"--engine {engine.value} reads Hugging Face folders, no GGUF files; {instead}"
        )
    out = out.resolve()
    check_destination(out, model_path.resolve(), overwrite=options.overwrite)
    calibration = (options.text or CalibrationText()).rows_of(model_path)
    with staged_folder(out) as staging:
        try:
            library.quantize(model_path, staging, scheme, calibration.rows)
        except Exception as error:  # a library may raise anything; the user gets one line
            raise QuantizeError(
                f"{engine.value} {release} failed with {type(error).__name__}: {error};"
                f" {library.tried}; {instead}"
            ) from error
        write_tokenizer_files(model_path, staging)
    return _report(out, options, method, time.monotonic() - started, f"{engine.value} {release}")


def _check(options: QuantizeOptions) -> WeightScheme:
    engine, library, scheme = options.engine, LIBRARIES[options.engine], options.scheme
    method = library.method
    if options.method not in (Method.RTN, method):
        what = f"does --method {method.value}, not {options.method.value}"
    elif options.format not in (WeightFormat.COMPRESSED_TENSORS, library.format):
        what = f"writes {library.format.value} folders, not {options.format.value}"
    elif not isinstance(scheme, WeightScheme):
        what = "makes integer weights"
    elif engine is QuantizeLibrary.AUTOAWQ and (scheme.bits, scheme.symmetric) != (4, False):
        what = "makes asymmetric weights of 4 bits; add --bits 4 --no-symmetric"
    else:
        return scheme
    raise ConfigError(f"--engine {engine.value} {what}")


def _report(
    out: Path, options: QuantizeOptions, method: Method, seconds: float, engine: str
) -> QuantizeReport:
    source, folder = open_model(out), SafetensorsFolder(out)
    sizes = {
        name: math.prod(folder.shape(name)) * numpy_dtype(folder.dtype(name)).itemsize
        for name in folder.tensor_names()
    }
    packed = [slot for slot in source.slots() if source.weights.packed_bits(slot.name) is not None]
    modules = tuple(slot.name.removesuffix("weight") for slot in packed)
    return QuantizeReport(
        out=out,
        architecture=source.spec.architecture,
        method=method.value,
        scheme=options.form,
        num_quantized=len(packed),
        quantized_parameters=sum(math.prod(slot.shape) for slot in packed),
        quantized_bytes=sum(size for name, size in sizes.items() if name.startswith(modules)),
        parameters=sum(math.prod(slot.shape) for slot in source.slots()),
        weight_bytes=sum(sizes.values()),
        seconds=seconds,
        notes=(f"quantized by {engine}",),
        card_tokens=options.card_tokens,
    )
