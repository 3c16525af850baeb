"""Runs another library's quantizer and turns its failures into one clear error."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Protocol

from appliance.errors import ConfigError, QuantizeError
from appliance.kernels.arrays import numpy_dtype
from appliance.model.source import open_model
from appliance.model_files.checkpoint import SafetensorsFolder
from appliance.quant.engines import autoawq, optimum
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
    """The functions of each module in this folder."""

    TRIED: str

    def installed(self) -> str:
        """Return the library's version, or raise ImportError."""
        ...

    def quantize(self, model_path: Path, out: Path, scheme: WeightScheme, rows: Tensor) -> None:
        """Write the quantized model into an empty folder."""
        ...


_LIBRARIES: dict[QuantizeLibrary, Library] = {
    QuantizeLibrary.AUTOAWQ: autoawq,
    QuantizeLibrary.OPTIMUM: optimum,
}
_METHODS = {QuantizeLibrary.AUTOAWQ: Method.AWQ, QuantizeLibrary.OPTIMUM: Method.GPTQ}
_FORMATS = {QuantizeLibrary.AUTOAWQ: WeightFormat.AWQ, QuantizeLibrary.OPTIMUM: WeightFormat.GPTQ}


def quantize_by_engine(model_path: Path, out: Path, options: QuantizeOptions) -> QuantizeReport:
    """Quantize a Hugging Face folder with another library, in its own format.

    Raises:
        ConfigError: the library does not support these options.
        QuantizeError: the library is not installed or failed; `out` is removed.
    """
    started = time.monotonic()
    engine, method = options.engine, _METHODS[options.engine]
    scheme = _check(options)
    library = _LIBRARIES[engine]
    instead = (
        f"use --method {method.value} --format {_FORMATS[engine].value}, which needs no library"
    )
    try:
        version = library.installed()
    except ImportError as error:
        raise QuantizeError(
            f"--engine {engine.value} cannot be imported ({error}); {library.TRIED}; {instead}"
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
                f"{engine.value} {version} failed with {type(error).__name__}: {error};"
                f" {library.TRIED}; {instead}"
            ) from error
        write_tokenizer_files(model_path, staging)
    return _report(out, options, method, time.monotonic() - started, f"{engine.value} {version}")


def _check(options: QuantizeOptions) -> WeightScheme:
    engine, method, scheme = options.engine, _METHODS[options.engine], options.scheme
    if options.method not in (Method.RTN, method):
        what = f"does --method {method.value}, not {options.method.value}"
    elif options.format not in (WeightFormat.COMPRESSED_TENSORS, _FORMATS[engine]):
        what = f"writes {_FORMATS[engine].value} folders, not {options.format.value}"
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
