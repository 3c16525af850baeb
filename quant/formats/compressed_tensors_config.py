"""Writes and reads the `quantization_config` of a compressed-tensors model.

The schema belongs to the compressed-tensors project.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.errors import ConfigError, UnsupportedModelError
from appliance.kernels.weights.fp8 import BLOCK
from appliance.quant.formats.scheme import (
    BITS,
    GROUP_SIZES,
    Fp4Scheme,
    Fp8Scheme,
    StoredScheme,
    TrellisScheme,
    WeightScheme,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from appliance.quant.formats.scheme import LinearScheme

METHOD = "compressed-tensors"
FORMAT = "pack-quantized"
FP8_FORMAT = "float-quantized"
MIXED_FORMAT = "mixed-precision"
NAIVE_FORMAT, DENSE_FORMAT = "naive-quantized", "dense"
INT_FORMATS = ("int-quantized", NAIVE_FORMAT)
FP4_FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
FORMATS = (FORMAT, FP8_FORMAT, MIXED_FORMAT, DENSE_FORMAT, *INT_FORMATS, *FP4_FORMATS)
SCHEMA_VERSION = "0.20.0"  # of the package that owns the schema


def quantization_config(
    schemes: Mapping[str, LinearScheme], ignore: Sequence[str], *, named: bool = False
) -> dict[str, Any]:
    """Build config.json's `quantization_config`.

    Args:
        schemes: one per quantized module, by module name; not empty.
        ignore: linear modules that stay unquantized.
        named: list every module by name, since some are no linears.
    """
    groups: dict[LinearScheme, list[str]] = {}
    for module, scheme in schemes.items():
        groups.setdefault(scheme, []).append(module)
    one = len(groups) == 1 and not named
    formats = {_format(scheme) for scheme in groups}
    asymmetric = any(isinstance(s, WeightScheme) and not s.symmetric for s in groups)
    # transformers up to 5.24 makes room for zero points that are not packed, and refuses packed
    # ones, unless it dequantizes as it loads. There it takes the first group's scheme for all.
    loading = {"dequantize": True} if asymmetric and one else {}
    return loading | {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else MIXED_FORMAT,
        "quantization_status": "compressed",
        "version": SCHEMA_VERSION,
        "config_groups": {
            f"group_{index}": {
                "targets": ["Linear"] if one else modules,
                "weights": _weight_arguments(scheme),
                "input_activations": _activation_arguments(scheme),
                "output_activations": None,
                "format": _format(scheme),
            }
            for index, (scheme, modules) in enumerate(groups.items())
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _format(scheme: LinearScheme) -> str:
    if isinstance(scheme, Fp4Scheme):
        return FP4_FORMATS[scheme.has_powers]
    return FP8_FORMAT if isinstance(scheme, Fp8Scheme) else FORMAT


def _weight_arguments(scheme: LinearScheme) -> dict[str, Any]:
    if isinstance(scheme, Fp8Scheme):
        return {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "block" if scheme.blockwise else "channel",
            "block_structure": [BLOCK, BLOCK] if scheme.blockwise else None,
            "dynamic": False,
        }
    if isinstance(scheme, Fp4Scheme):
        stored = "torch.uint8" if scheme.has_powers else "torch.float8_e4m3fn"
        return {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "group" if scheme.has_powers else "tensor_group",
            "group_size": scheme.group_size,
            "dynamic": False,
            "scale_dtype": stored,
            "zp_dtype": stored,
        }
    assert not isinstance(scheme, TrellisScheme), "in folders of its own"
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
        "actorder": None,
    }


def _activation_arguments(scheme: LinearScheme) -> dict[str, Any] | None:
    """Describe dynamic FP8 activations: per token, or per token and 128 inputs."""
    if not isinstance(scheme, Fp8Scheme) or not scheme.quantized_inputs:
        return None
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "group" if scheme.blockwise else "token",
        "group_size": BLOCK if scheme.blockwise else None,
        "dynamic": True,
    }


@dataclass(frozen=True, slots=True)
class DeclaredWeights:
    """Settings of the quantized weights of a model.

    Attributes:
        schemes: of integers and e4m3; tensors show which of them a module has.
        fp4_groups: (format, group size) of groups of 4-bit floats.
        rounded_inputs: inputs that the checkpoint wants quantized and that stay in 16 bits here.
    """

    schemes: tuple[LinearScheme, ...]
    fp4_groups: tuple[tuple[str, object], ...] = ()
    rounded_inputs: bool = False


def declared_weights(config: Mapping[str, Any]) -> DeclaredWeights:
    """Read the weights' schemes from a config, or raise UnsupportedModelError.

    `quantization_status` is not asked: the types of the tensors say what they hold. Neither are
    targets, as each scheme has parts of its own type and shape.
    """
    sparsity = config.get("sparsity_config")
    sparse = sparsity.get("format") if isinstance(sparsity, dict) else sparsity
    if sparse not in (None, "dense"):
        raise _unsupported(f"sparsity_config with format {sparse!r}")
    format = config.get("format") or DENSE_FORMAT
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not (groups or format == DENSE_FORMAT):
        raise _unsupported("a config without config_groups")
    if not isinstance(format, str) or format not in FORMATS:
        raise _unsupported(f"format {format!r}")
    schemes: list[LinearScheme] = []
    fp4_groups: list[tuple[str, object]] = []
    rounded = False
    for name, group in groups.items():
        weights, activations, own = _arguments(name, group, format)
        if weights is None:
            continue
        is_fp8 = False
        if own in FP4_FORMATS:
            fp4_groups.append((own, weights.get("group_size")))
        else:
            schemes.append(_scheme(weights, activations, own))
            is_fp8 = isinstance(schemes[-1], Fp8Scheme)
        rounded |= activations is not None and not (is_fp8 and activations.get("dynamic"))
    return DeclaredWeights(tuple(schemes), tuple(fp4_groups), rounded)


def _arguments(
    name: str, group: object, format: str
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None, str]:
    """Return a group's settings of weights and of inputs, and its format.

    Weights are None where they stay as they are, as in a group of attention alone.
    """
    if not isinstance(group, dict):
        raise _unsupported(f"a config group {name!r} without weights")
    weights, activations = group.get("weights"), group.get("input_activations")
    if group.get("output_activations") is not None:
        raise _unsupported("output_activations that are quantized")
    if not isinstance(weights, dict | None) or (weights is None and activations is None):
        raise _unsupported(f"a config group {name!r} without weights")
    if not isinstance(activations, dict | None):
        raise _unsupported(f"input_activations of {activations!r}")
    own = str(group.get("format") or format)
    if weights and own in (MIXED_FORMAT, DENSE_FORMAT):
        bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
        if (bits, kind) == (4, "float"):
            own = FP4_FORMATS[weights.get("group_size") == 32]
        else:
            own = FP8_FORMAT if kind == "float" else FORMAT
    return weights, activations, own


def _scheme(
    weights: Mapping[str, Any], activations: Mapping[str, Any] | None, format: str
) -> LinearScheme:
    is_float = weights.get("type", "int") == "float"
    if format == FP8_FORMAT or (is_float and format == NAIVE_FORMAT):
        return _float_scheme(weights, activations)
    if format not in (FORMAT, *INT_FORMATS):
        raise _unsupported(f"format {format!r}")
    if is_float:
        raise _unsupported(f"packed weights of type {weights['type']!r}")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or (
        "group" if isinstance(size, int) and size > 0 else "channel"
    )
    if strategy not in ("group", "channel", "tensor"):
        raise _unsupported(f"strategy {strategy!r}")
    bits, symmetric = weights.get("num_bits", 8), weights.get("symmetric", True) is not False
    size = size if strategy == "group" else None
    is_ours = bits in BITS and (size is None or size in GROUP_SIZES)
    try:
        return (WeightScheme if is_ours else StoredScheme)(bits, size, symmetric)
    except ConfigError as error:
        raise _unsupported(str(error)) from error


def _float_scheme(weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> Fp8Scheme:
    if weights.get("type") != "float" or weights.get("num_bits", 8) != 8:
        raise _unsupported(f"{weights.get('num_bits')}-bit {weights.get('type')} weights as floats")
    strategy = weights.get("strategy") or ("block" if weights.get("block_structure") else "tensor")
    if strategy not in ("channel", "tensor", "block"):
        raise _unsupported(f"strategy {strategy!r} of FP8 weights")
    if strategy == "block" and weights.get("block_structure") != [BLOCK, BLOCK]:
        raise _unsupported(f"FP8 blocks of {weights.get('block_structure')}")
    return Fp8Scheme(
        strategy == "block",
        quantized_inputs=activations is not None and bool(activations.get("dynamic")),
    )


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"this compressed-tensors model has {what}; supported are compressed {FORMAT} and"
        f" int-quantized integer weights of 2 to 8 bits in groups of multiples of 32 or by channel,"
        f" {FP8_FORMAT} weights of 8 bits by tensor, channel or block of 128x128, and"
        f" {' and '.join(FP4_FORMATS)} weights, with any input_activations; quantize the 16-bit"
        " model that it was made from with appliance quantize"
    )
