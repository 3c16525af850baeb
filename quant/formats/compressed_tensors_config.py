"""The `quantization_config` of a compressed-tensors model: what is written, what is understood.

The schema belongs to the compressed-tensors project.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.errors import ConfigError, UnsupportedModelError
from appliance.quant.scheme import WeightScheme

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

METHOD = "compressed-tensors"
FORMAT = "pack-quantized"
SCHEMA_VERSION = "0.20.0"  # of the package whose schema is written


def quantization_config(
    schemes: Mapping[str, WeightScheme], ignore: Sequence[str]
) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    Args:
        schemes: of every quantized linear module, by its name; not empty.
        ignore: linear modules that were not quantized.
    """
    groups: dict[WeightScheme, list[str]] = {}
    for module, scheme in schemes.items():
        groups.setdefault(scheme, []).append(module)
    one = len(groups) == 1
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "version": SCHEMA_VERSION,
        "config_groups": {
            f"group_{index}": {
                "targets": ["Linear"] if one else modules,
                "weights": _weight_arguments(scheme),
                "input_activations": None,
                "output_activations": None,
                "format": FORMAT,
            }
            for index, (scheme, modules) in enumerate(groups.items())
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _weight_arguments(scheme: WeightScheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
        "actorder": None,
    }


def declared_schemes(config: Mapping[str, Any]) -> tuple[WeightScheme, ...]:
    """The weight schemes of a `quantization_config`.

    Raises:
        UnsupportedModelError: a format, strategy or type that is not read here.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _unsupported("a config without config_groups")
    if config.get("format") != FORMAT:
        raise _unsupported(f"format {config.get('format')!r}")
    if config.get("quantization_status") != "compressed":
        raise _unsupported(f"quantization_status {config.get('quantization_status')!r}")
    return tuple(_scheme(group) for group in groups.values())


def _scheme(group: object) -> WeightScheme:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        raise _unsupported("a config group without weights")
    if group.get("format") not in (None, FORMAT):
        raise _unsupported(f"format {group['format']!r}")
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            raise _unsupported(f"{key} that are quantized")
    if weights.get("type", "int") != "int":
        raise _unsupported(f"weights of type {weights['type']!r}")
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


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"this compressed-tensors model has {what}; supported are compressed {FORMAT} integer"
        " weights of 4 or 8 bits in groups of 32, 64 or 128 or by channel, with 16-bit activations"
    )
