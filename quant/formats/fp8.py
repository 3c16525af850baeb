"""Reads folders of e4m3 weights: scaled per tensor or row, or per block in `weight_scale_inv`.

The block form is DeepSeek's ("fp8", fine-grained; its scale multiplies, despite the name).
ModelOpt's and FBGEMM's forms with a scale per tensor or row differ only in the config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels import arrays
from appliance.kernels.weights.fp8 import BLOCK, Fp8Weight
from appliance.quant.formats.compressed_tensors import ROUNDED_INPUTS
from appliance.quant.formats.dense import DenseWeights
from appliance.quant.formats.fp4 import MODELOPT_NVFP4, check_group_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from appliance.model_files.checkpoint import SafetensorsFolder

METHOD, MODELOPT = "fp8", "modelopt"
E4M3 = ("e4m3", "float8_e4m3fn", "e4m3fn", "float8_e4m3")  # names of one format
MIXED, PER_TOKEN = "MIXED_PRECISION", "FP8_PER_CHANNEL_PER_TOKEN"
ALGORITHMS = (  # of ModelOpt; those with NVFP4 have its weights, whatever their inputs are
    "FP8", PER_TOKEN, "FP8_PB_WO",
    "NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8",
)  # fmt: skip
WEIGHT, BLOCK_SCALE, TENSOR_SCALE = ".weight", ".weight_scale_inv", ".weight_scale"
INPUT_SCALES = (".input_scale", ".activation_scale", ".input_scale_ub")
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")


class Fp8Weights(DenseWeights):
    """Reads a folder of FP8 weights, one tensor at a time; other tensors are dense.

    Inputs become FP8 at run time if the checkpoint asks for it. Static input scales are ignored:
    those inputs stay in 16 bits.

    Args:
        folder: its config.json has a `quantization_config` of one of the methods.

    Raises:
        UnsupportedModelError: an unknown number format or block size.
    """

    def __init__(self, folder: SafetensorsFolder) -> None:
        super().__init__(folder)
        config = folder.config["quantization_config"]
        self._quantized_inputs = quantizes_inputs(config)
        self._notes = (ROUNDED_INPUTS,) if rounds_inputs(config) else ()
        self._stored = frozenset(folder.tensor_names())
        codes = {name for name in self._stored if folder.dtype(name) == "float8_e4m3fn"}
        stacks = {name for name in codes if len(folder.shape(name)) == 3}
        self._stack_scales = {name: self._scale_of_stack(name) for name in stacks}
        self._codes = {name for name in codes if name.endswith(WEIGHT)}
        suffixes = (BLOCK_SCALE, TENSOR_SCALE, *INPUT_SCALES)
        modules = [name.removesuffix(WEIGHT) for name in self._codes]
        parts = {module + suffix for module in modules for suffix in suffixes}
        self._names = sorted(self._stored - parts - set(self._stack_scales.values()))

    def tensor_names(self) -> list[str]:
        """List every tensor except scales."""
        return list(self._names)

    def float_bits(self, name: str) -> int | None:
        return 8 if name in self._codes or name in self._stack_scales else None

    def load_matrix(self, name: str, index: int, *, transposed: bool) -> Fp8Weight | None:
        """Load the matrix at `index` of a stack of experts; None: the stack is no FP8.

        Args:
            transposed: it is stored as (in_features, out_features).

        Raises:
            CheckpointError: the stack's scales are of another shape.
            UnsupportedModelError: the stack has no scales of a name that is known.
        """
        if name not in self._stack_scales:
            return None
        scale_name = self._stack_scales[name]
        if scale_name is None:
            raise UnsupportedModelError(
                f"{name} is a stack of FP8 experts without {' or '.join(_stack_scales(name))};"
                " take the 16-bit model that it was made from, and quantize it with appliance"
                " quantize"
            )
        count, *shape = self._folder.shape(name)
        if self._folder.shape(scale_name)[:1] != (count,):
            raise CheckpointError(
                f"{scale_name} has shape {self._folder.shape(scale_name)}, but {name} has {count}"
                " experts; download or quantize the model again"
            )
        codes = self._folder.load_part(name, index, 0, shape[0])
        scale = self._folder.load_rows(scale_name, index, index + 1)[0]
        if transposed:
            kind = codes.dtype
            codes = arrays.viewed(arrays.viewed(codes, "uint8").T.contiguous(), kind)
            rows = codes.shape[0]
            # A scale of each output is one of each column; blocks turn with their codes.
            scale = scale.reshape(-1) if scale.numel() in (1, rows) else scale.T.contiguous()
        values = _scales(scale_name, scale, codes.shape)
        return Fp8Weight(codes, values, quantized_inputs=self._quantized_inputs)

    def _scale_of_stack(self, name: str) -> str | None:
        return next((each for each in _stack_scales(name) if each in self._stored), None)

    def notes(self) -> tuple[str, ...]:
        return self._notes

    def load(self, name: str) -> Tensor | Fp8Weight:
        if name not in self._codes:
            return self._folder.load(name)
        codes = self._folder.load(name)
        if codes.dim() != 2:
            raise CheckpointError(
                f"{name} has shape {tuple(codes.shape)}, which is no matrix; "
                "download or quantize the model again"
            )
        module = name.removesuffix(WEIGHT)
        is_blockwise = module + BLOCK_SCALE in self._stored
        scale_name = module + (BLOCK_SCALE if is_blockwise else TENSOR_SCALE)
        if scale_name not in self._stored:
            raise CheckpointError(
                f"{module}{BLOCK_SCALE} is missing, the scales of {name}; download the model again"
            )
        return Fp8Weight(
            codes,
            _scales(scale_name, self._folder.load(scale_name), codes.shape),
            quantized_inputs=self._quantized_inputs,
        )


def _stack_scales(name: str) -> tuple[str, ...]:
    """Name the scales that a stack of experts may have, by Step's, FBGEMM's and other writers."""
    module = name.removesuffix(WEIGHT)
    ends = (BLOCK_SCALE, TENSOR_SCALE, "_scale_inv", "_scale")
    return tuple(module + end for end in ends)


def _scales(name: str, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Convert stored scales to those of `Fp8Weight`."""
    rows, columns = shape
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    found = tuple(scale.shape)
    if arrays.dtype_name(scale.dtype) not in SCALE_DTYPES:
        raise CheckpointError(
            f"{name} has type {scale.dtype}, which no scale has; "
            "download or quantize the model again"
        )
    values = scale.float()
    if not arrays.is_finite(values):
        raise CheckpointError(f"{name} holds NaN or infinity; quantize the model again")
    if found == (blocks[0], 1, blocks[1], 1):  # ModelOpt's
        values, found = values.reshape(*blocks), blocks
    if found == blocks and (name.endswith(BLOCK_SCALE) or blocks[0] != rows):
        return values
    if scale.numel() == 1:
        return values.reshape(-1).expand(rows).contiguous()
    if found in ((rows,), (rows, 1)):
        return values.reshape(-1)
    raise CheckpointError(
        f"{name} has shape {found}; a weight of {rows} x {columns} has {blocks} in blocks, or one"
        " or a row each; download or quantize the model again"
    )


def quantizes_inputs(config: Mapping[str, Any]) -> bool:
    """Check a config of one of the methods; return True if inputs become FP8 at run time.

    Raises:
        UnsupportedModelError: an unknown number format or block size.
    """
    method = str(config.get("quant_method"))
    if method.startswith(MODELOPT) or "quant_algo" in config:
        _check_algorithms(config)
    if method.startswith(MODELOPT):
        return bool(_algorithm(config) == PER_TOKEN)
    if str(config.get("fmt") or E4M3[0]) not in E4M3:
        raise _unsupported(f"numbers in {config['fmt']!r}")
    block = config.get("weight_block_size")
    if block is not None and block != [BLOCK, BLOCK]:
        raise _unsupported(f"blocks of {block}")
    scheme = config.get("activation_scheme") or "dynamic"
    if scheme not in ("dynamic", "static"):
        raise _unsupported(f"activation_scheme {scheme!r}")
    return bool(scheme == "dynamic")


def rounds_inputs(config: Mapping[str, Any]) -> bool:
    """Return True if the checkpoint wants inputs quantized by scales of its own or to 4 bits."""
    if config.get("activation_scheme") == "static":
        return True
    layers = config.get("quantized_layers")
    layers = layers.values() if isinstance(layers, dict) else ()
    names = {_algorithm(layer) for layer in layers}
    return bool({_algorithm(config), *names} & {"FP8", "NVFP4", "W4A8_NVFP4_FP8"})


def _algorithm(settings: object) -> Any:
    """Return ModelOpt's name of an algorithm in capitals: its exports have fp8_pb_wo in small."""
    found = settings.get("quant_algo") if isinstance(settings, dict) else settings
    return found.upper() if isinstance(found, str) else found


def _check_algorithms(config: Mapping[str, Any]) -> None:
    """Refuse ModelOpt's algorithms whose weights are neither e4m3 nor NVFP4, by name."""
    algorithm, layers = _algorithm(config), config.get("quantized_layers") or {}
    if algorithm is None and not layers:  # the KV cache alone is quantized
        return
    if algorithm != MIXED and algorithm not in ALGORITHMS:
        raise _unsupported(f"quant_algo {algorithm!r}")
    if not isinstance(layers, dict):
        raise _unsupported(f"quantized_layers of {layers!r}")
    check_group_size(MODELOPT_NVFP4, config.get("group_size"))
    for name, layer in layers.items():
        own = _algorithm(layer)
        if own not in ALGORITHMS:
            raise _unsupported(f"quant_algo {own!r} of {name}")
        check_group_size(MODELOPT_NVFP4, layer.get("group_size") if "NVFP4" in own else None)


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"this FP8 or ModelOpt model has {what}; supported are e4m3 weights with a scale for"
        f" each tensor, each row or each block of {BLOCK} x {BLOCK}, and of ModelOpt"
        f" {', '.join(ALGORITHMS)} and {MIXED}; quantize the 16-bit model that it was made from"
        " with appliance quantize"
    )
