"""Writes and reads the `quantization_config` of a compressed-tensors model.

The schema belongs to the compressed-tensors project.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.errors import ConfigError, UnsupportedModelError
from appliance.kernels.fp8 import BLOCK
from appliance.quant.formats.scheme import Fp8Scheme, WeightScheme

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from appliance.quant.formats.scheme import LinearScheme

METHOD = "compressed-tensors"
FORMAT = "pack-quantized"
FP8_FORMAT = "float-quantized"
MIXED_FORMAT = "mixed-precision"
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
    return {
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


def declared_schemes(config: Mapping[str, Any]) -> tuple[LinearScheme, ...]:
    """Read the weight schemes from a config, or raise UnsupportedModelError."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _unsupported("a config without config_groups")
    if config.get("format") not in (FORMAT, FP8_FORMAT, MIXED_FORMAT):
        raise _unsupported(f"format {config.get('format')!r}")
    if config.get("quantization_status") != "compressed":
        raise _unsupported(f"quantization_status {config.get('quantization_status')!r}")
    return tuple(_scheme(group, str(config["format"])) for group in groups.values())


def _scheme(group: object, format: str) -> LinearScheme:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        raise _unsupported("a config group without weights")
    if group.get("output_activations") is not None:
        raise _unsupported("output_activations that are quantized")
    format = group.get("format") or format
    if format == FP8_FORMAT:
        return _float_scheme(weights, group.get("input_activations"))
    if format != FORMAT:
        raise _unsupported(f"format {format!r}")
    if group.get("input_activations") is not None:
        raise _unsupported("input_activations that are quantized")
    if weights.get("type", "int") != "int":
        raise _unsupported(f"packed weights of type {weights['type']!r}")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("group" if size and size > 0 else "channel")
    if strategy not in ("group", "channel"):
        raise _unsupported(f"strategy {strategy!r}")
    try:
        return WeightScheme(
            bits=weights.get("num_bits", 8),
            group_size=size if strategy == "group" else None,
            symmetric=weights.get("symmetric", True),
        )
    except ConfigError as error:
        raise _unsupported(str(error)) from error


def _float_scheme(weights: Mapping[str, Any], activations: object) -> Fp8Scheme:
    if weights.get("type") != "float" or weights.get("num_bits") != 8:
        raise _unsupported(f"{weights.get('num_bits')}-bit {weights.get('type')} weights as floats")
    if isinstance(activations, dict) and not activations.get("dynamic"):
        raise _unsupported("input_activations with scales of their own")
    strategy = weights.get("strategy")
    if strategy not in ("channel", "tensor", "block"):
        raise _unsupported(f"strategy {strategy!r} of FP8 weights")
    if strategy == "block" and weights.get("block_structure") != [BLOCK, BLOCK]:
        raise _unsupported(f"FP8 blocks of {weights.get('block_structure')}")
    return Fp8Scheme(strategy == "block", quantized_inputs=activations is not None)


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"this compressed-tensors model has {what}; supported are compressed {FORMAT} integer"
        " weights of 3, 4 or 8 bits in groups of 32, 64 or 128 or by channel, with 16-bit"
        f" activations, and {FP8_FORMAT} weights of 8 bits by tensor, channel or block of 128x128"
    )
