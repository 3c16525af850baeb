"""Reads a checkpoint's declarations about its KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.errors import UnsupportedModelError
from appliance.model.executor import heads_of
from appliance.quant.formats.kv_plan import KVLayer, read_plan, stored_scales

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.model.source import ModelSource


def planned_kv(source: ModelSource) -> tuple[KVLayer, ...] | None:
    """Read the plan of `--kv-bits`, or None; raise CheckpointError if it does not fit."""
    if not source.path.is_dir():
        return None
    return read_plan(source.path, heads_of(source.spec))


def kv_scales(source: ModelSource) -> tuple[list[Tensor | None], int]:
    """Read each layer's FP8 scales, (2, num_kv_heads) or None; count layers without.

    Raises:
        CheckpointError: a scale has an unknown shape.
    """
    names = source.family.names
    layers = [names.in_layer(i, "").removesuffix(".") for i in source.spec.cache_layers]
    scales, missing = stored_scales(source.weights, layers, heads_of(source.spec))
    return scales, len(missing)


def wants_fp8(source: ModelSource) -> bool:
    """Return True if `kv_cache_scheme` in config.json asks for FP8 keys and values.

    Raises:
        UnsupportedModelError: it asks for another precision.
    """
    config: Any = source.config.get("quantization_config")
    config = config if isinstance(config, dict) else {}
    scheme = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
    if isinstance(scheme, str) and scheme.upper() not in ("FP8", "NONE", "AUTO"):
        raise UnsupportedModelError(
            f"{source.path.name}: kv_cache_quant_algo asks for {scheme}; only FP8 is read, so"
            " choose a KV format with --kv-cache-dtype"
        )
    if not isinstance(scheme, dict):
        return str(scheme).upper() == "FP8"  # ModelOpt's word for it
    if scheme.get("type") != "float" or scheme.get("num_bits") != 8 or scheme.get("dynamic"):
        raise UnsupportedModelError(
            f"{source.path.name}: kv_cache_scheme asks for {scheme.get('num_bits')} bits of type "
            f"{scheme.get('type')!r}; only static 8-bit float is read, so choose a KV format with "
            "--kv-cache-dtype"
        )
    return True
