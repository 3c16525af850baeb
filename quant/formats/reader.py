"""Opens a safetensors folder in any known weight format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from appliance.errors import UnsupportedModelError
from appliance.model_files.checkpoint import QUANTIZATION, SafetensorsFolder
from appliance.quant.formats import (
    awq,
    bitsandbytes,
    compressed_tensors_config,
    exl3,
    fp4,
    fp8,
    gptq,
    trellis,
)
from appliance.quant.formats.bitsandbytes import BitsAndBytesWeights
from appliance.quant.formats.compressed_tensors import CompressedTensorsWeights
from appliance.quant.formats.compressed_tensors_config import declared_weights
from appliance.quant.formats.dense import DenseWeights
from appliance.quant.formats.exl3 import Exl3Weights
from appliance.quant.formats.fp4 import Fp4Weights
from appliance.quant.formats.fp8 import Fp8Weights
from appliance.quant.formats.trellis import TrellisWeights
from appliance.quant.formats.word_packed import WordPackedWeights

if TYPE_CHECKING:
    from appliance.kernels.weights.weight import Weight


class WeightReader(Protocol):
    """Reads a model's tensors on demand, by their unquantized names."""

    def tensor_names(self) -> list[str]:
        """List all tensors, such as model.layers.0.self_attn.q_proj.weight."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's unpacked shape without reading it."""
        ...

    def packed_bits(self, name: str) -> int | None:
        """Return the bits of a weight's integer codes once loaded; None if it has none."""
        ...

    def group_size(self, name: str) -> int | None:
        """Return the inputs that share a scale of integer codes; None of others, or if unknown."""
        ...

    def float_bits(self, name: str) -> int | None:
        """Return the bits of a weight's floating-point codes, 8 or 4; None if it has none."""
        ...

    def load(self, name: str) -> Weight:
        """Read one tensor; raise CheckpointError if parts are missing or damaged."""
        ...

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user about the tensors loaded so far, one line each."""
        ...


def is_read(config: object) -> bool:
    """Return True if a `quantization_config` names a known method."""
    return isinstance(config, dict) and _method(config) in _READERS


def open_weights(folder: SafetensorsFolder) -> WeightReader:
    """Choose the reader by `quantization_config`, or raise UnsupportedModelError."""
    config = folder.config.get(QUANTIZATION)
    if config is None:
        _check_unquantized(folder)
        return DenseWeights(folder)
    method = _method(config) if isinstance(config, dict) else None
    if method in _READERS:
        try:
            _check_rotations(config)
            return _READERS[method](folder, config)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{folder.path}: {QUANTIZATION}: {error}") from error
    called = _CALLED.get(str(method), repr(method or config))
    raise UnsupportedModelError(
        f"{folder.path}: weights quantized by {called} cannot be read; supported are unquantized"
        " weights, compressed-tensors, AWQ, GPTQ, AutoRound, MXFP4, NVFP4, FP8 of DeepSeek's,"
        f" ModelOpt's or FBGEMM's form, bitsandbytes, EXL3, and the trellis format;"
        f" {_WAYS.get(str(method), _OTHER_WAY)}"
    )


def _check_unquantized(folder: SafetensorsFolder) -> None:
    """Refuse quantized weights whose settings are nowhere: their own numbers mean nothing."""
    for name in folder.tensor_names():
        if name.endswith(_QUANTIZED_PARTS):
            raise UnsupportedModelError(
                f"{folder.path}: tensor {name} is a part of a quantized weight, but neither"
                f" {QUANTIZATION} in config.json nor a quantize_config.json (GPTQ),"
                " quant_config.json (AWQ) or hf_quant_config.json (ModelOpt) says how it was"
                " quantized; fetch that file of the model as well"
            )


def _check_rotations(config: Mapping[str, Any]) -> None:
    """Refuse weights that fit only inputs which are rotated while the model runs."""
    for key in ("transform_config", "rotation_config", "rotation"):
        found = config.get(key)
        if isinstance(found, dict) and "config_groups" in found:
            found = found["config_groups"]
        if found:
            raise UnsupportedModelError(
                f"{QUANTIZATION} has {key} = {str(found)[:80]}: rotations while the model runs are"
                f" not supported; {_OTHER_WAY}"
            )


def _method(config: Mapping[str, Any]) -> str | None:
    """Return the method under one name, whatever the version of its program writes."""
    method = config.get("quant_method")
    if not isinstance(method, str):
        return None
    method = method.lower().replace("_", "-").removeprefix("intel/")
    for name in (fp8.MODELOPT, bitsandbytes.METHOD):  # such as modelopt_fp4, bitsandbytes_4bit
        if method.startswith(name):
            return name
    return _ALIASES.get(method, method)


def _compressed_tensors(folder: SafetensorsFolder, config: Mapping[str, Any]) -> WeightReader:
    declared = declared_weights(config)
    rest = CompressedTensorsWeights(folder, declared)
    forms = dict.fromkeys(fp4.PACKED[name] for name, _ in declared.fp4_groups)
    for name, size in declared.fp4_groups:
        fp4.check_group_size(fp4.PACKED[name], size)
    return Fp4Weights(folder, tuple(forms), rest) if forms else rest


def _fp8(folder: SafetensorsFolder, config: Mapping[str, Any]) -> WeightReader:
    """Read e4m3 weights and, beside them, NVFP4: ModelOpt mixes both in one model."""
    return Fp4Weights(folder, (fp4.MODELOPT_NVFP4,), Fp8Weights(folder))


def _auto_round(folder: SafetensorsFolder, config: Mapping[str, Any]) -> WeightReader:
    """Choose the reader by the packing, which the first versions called the backend.

    Raises:
        UnsupportedModelError: the numbers are neither integers nor 4-bit floats.
    """
    packing = str(config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq")
    kind, bits = str(config.get("data_type") or "int"), config.get("bits")
    if kind.startswith("int") and "awq" in packing:
        return WordPackedWeights(folder, awq.declared_layout({**config, "version": "gemm"}))
    if kind.startswith("int") and "llm_compressor" not in packing:
        return WordPackedWeights(folder, gptq.auto_round_layout(config, packing))
    if bits == 4 and kind.startswith(("nv_fp", "mx_fp")) and "e5m3" not in packing:
        return Fp4Weights(folder, (*fp4.PACKED.values(),), DenseWeights(folder))
    if bits == 8 and kind.startswith("fp") and "e5m2" not in kind:
        return Fp8Weights(folder)
    raise UnsupportedModelError(
        f"this AutoRound model has {bits!r} bits of data_type {kind!r} with packing_format"
        f" {packing!r}; supported are integers, e4m3, and nv_fp and mx_fp of 4 bits;"
        f" {_OTHER_WAY}"
    )


_READERS: dict[str | None, Callable[[SafetensorsFolder, Mapping[str, Any]], WeightReader]] = {
    compressed_tensors_config.METHOD: _compressed_tensors,
    awq.METHOD: lambda folder, config: WordPackedWeights(folder, awq.declared_layout(config)),
    gptq.METHOD: lambda folder, config: WordPackedWeights(folder, gptq.declared_layout(config)),
    gptq.AUTO_ROUND: _auto_round,
    fp8.METHOD: _fp8,
    fp8.MODELOPT: _fp8,
    fp4.MXFP4: lambda folder, config: Fp4Weights(folder, (fp4.GPT_OSS,), DenseWeights(folder)),
    bitsandbytes.METHOD: lambda folder, config: BitsAndBytesWeights(folder),
    trellis.METHOD: TrellisWeights,
    exl3.METHOD: Exl3Weights,
}
_ALIASES = {
    "sparseml": compressed_tensors_config.METHOD,  # of its first versions
    "fbgemm-fp8": fp8.METHOD,
    "autoround": gptq.AUTO_ROUND,
}
# Endings of parts that no unquantized model has.
_QUANTIZED_PARTS = (
    ".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_scale_2",
    ".SCB", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4",
    ".trellis",
)  # fmt: skip
# Methods that people meet and that have no reader here, as their projects call them.
_CALLED = {
    "mlx": "MLX",
    "torchao": "torchao",
    "hqq": "HQQ",
    "eetq": "EETQ",
    "quanto": "Quanto",
    "aqlm": "AQLM",
    "spqr": "SpQR",
    "vptq": "VPTQ",
    "higgs": "HIGGS",
    "bitnet": "BitNet",
    "exl2": "ExLlamaV2 (exl2)",
    "quark": "Quark",
    "quip": "QuIP#",
    "gguf": "GGUF in a folder",
}
_OTHER_WAY = (
    "take the 16-bit model that this one was made from and run appliance quantize MODEL, or take"
    " its GGUF, AWQ, GPTQ or compressed-tensors form"
)
_WAYS = {"gguf": "name the .gguf file itself"}
