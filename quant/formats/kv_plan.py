"""Reads and writes a checkpoint's KV cache plan; reads other projects' scale tensors.

`kv_cache.json` holds each layer's format, FP8 scales per head and mean keys; other readers ignore
it. The tensors k_scale and v_scale, one number or one per head, belong to the compressed-tensors
project.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.errors import CheckpointError
from appliance.files import read_json
from appliance.kernels import arrays
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from appliance.quant.formats.reader import WeightReader

FILE = "kv_cache.json"
VERSION = 1
SCALE_NAMES = ("self_attn.k_scale", "self_attn.v_scale")
# Endings of the same scales in ModelOpt's folders and in compressed-tensors' of before August 2024.
KEY_SCALES = (".k_scale", ".k_proj.k_scale", ".k_proj.output_scale")
VALUE_SCALES = (".v_scale", ".v_proj.v_scale", ".v_proj.output_scale")


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer of a plan.

    Attributes:
        head_scales: (2, num_kv_heads) float32 FP8 scales of keys and values.
        plain_scales: the same for readers that do not subtract the mean key.
        key_mean: (num_kv_heads, head_dim) float32; None if subtracting it gains nothing.
        errors: error added to the residual stream as a share of its energy, by format.
        key_factors: (num_kv_heads, head_dim) float32, by which the weights divide keys and multiply
            queries, or None.
    """

    format: KVFormat
    head_scales: Tensor
    plain_scales: Tensor
    key_mean: Tensor | None
    errors: dict[str, float]
    key_factors: Tensor | None = None

    def precision(self, format: KVFormat | None = None) -> LayerPrecision:
        """Return the layer's precision, in the planned format or another."""
        format = format or self.format
        scales = self.head_scales if format is KVFormat.FP8 else None
        return LayerPrecision(format, scales, self.key_mean if format.is_quantized else None)


def to_json(layers: Sequence[KVLayer], bits: float) -> dict[str, Any]:
    """Build the content of `kv_cache.json`.

    `bits` is the mean per element, scales included.
    """
    return {
        "version": VERSION,
        "bits_per_element": round(bits, 4),
        "layers": [
            {
                "format": layer.format.value,
                "k_scale": layer.head_scales[0].tolist(),
                "k_scale_with_mean": layer.plain_scales[0].tolist(),
                "v_scale": layer.head_scales[1].tolist(),
                "k_mean": None if layer.key_mean is None else layer.key_mean.tolist(),
                "k_factors": None if layer.key_factors is None else layer.key_factors.tolist(),
                "errors": layer.errors,
            }
            for layer in layers
        ],
    }


def read_plan(folder: Path, heads: Sequence[tuple[int, int]]) -> tuple[KVLayer, ...] | None:
    """Read a model folder's plan; None if it has none.

    `heads` lists each layer's (num_kv_heads, head_dim).

    Raises:
        CheckpointError: the file is damaged, of a later version, or of another model.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    content = read_json(path)
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {content.get('version')!r}, but only {VERSION} can be read; use a"
            " newer appliance, or remove the file to serve without its plan"
        )
    layers = content.get("layers")
    if not isinstance(layers, list) or len(layers) != len(heads):
        raise CheckpointError(f"{path} is of another model; remove it or quantize again")
    try:
        return tuple(_layer(entry, *of) for entry, of in zip(layers, heads, strict=True))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); quantize the model again") from error


def _layer(entry: dict[str, Any], num_kv_heads: int, head_dim: int) -> KVLayer:
    scales = _floats([entry["k_scale"], entry["v_scale"]])
    key_mean, key_factors = (
        None if numbers is None else _floats(numbers)
        for numbers in (entry["k_mean"], entry.get("k_factors"))
    )
    _check_shape(scales, (2, num_kv_heads))
    if not bool((scales > 0).all()):
        raise ValueError("a scale is not positive")
    for by_channel in (key_mean, key_factors):
        if by_channel is not None:
            _check_shape(by_channel, (num_kv_heads, head_dim))
    plain = arrays.stack((_floats(entry.get("k_scale_with_mean", entry["k_scale"])), scales[1]))
    _check_shape(plain, (2, num_kv_heads))
    return KVLayer(
        format=KVFormat(entry["format"]),
        head_scales=scales,
        plain_scales=plain,
        key_mean=key_mean,
        errors=dict(entry["errors"]),
        key_factors=key_factors,
    )


def _floats(numbers: Any) -> Tensor:
    return arrays.of_numpy(np.array(numbers, dtype=np.float32))  # type: ignore[no-any-return]


def _check_shape(tensor: Tensor, shape: tuple[int, int]) -> None:
    if tuple(tensor.shape) != shape or not arrays.is_finite(tensor):
        raise ValueError(f"{tuple(tensor.shape)} numbers, not finite ones of {shape}")


def stored_scales(
    weights: WeightReader, layer_names: Sequence[str], heads: Sequence[tuple[int, int]]
) -> tuple[list[Tensor | None], list[str]]:
    """Read a checkpoint's FP8 scale tensors.

    Args:
        layer_names: such as model.layers.0.
        heads: (num_kv_heads, head_dim) of each layer.

    Returns:
        (2, num_kv_heads) float32 of keys and values for each layer, or None; and the names of
        layers without scales.

    Raises:
        CheckpointError: a layer has neither one scale nor one per head.
    """
    present = set(weights.tensor_names())
    found: list[Tensor | None] = []
    missing = []
    for layer, (num_kv_heads, _) in zip(layer_names, heads, strict=True):
        endings = [*zip(KEY_SCALES, VALUE_SCALES, strict=True), (".kv_scale", ".kv_scale")]
        choices = [[f"{layer}.self_attn{end}" for end in pair] for pair in endings]
        names = next((pair for pair in choices if present.issuperset(pair)), None)
        if names is None:
            found.append(None)
            missing.append(layer)
            continue
        found.append(arrays.stack([_scales(weights, name, num_kv_heads) for name in names]))
    return found, missing


def _scales(weights: WeightReader, name: str, num_kv_heads: int) -> Tensor:
    scales = weights.load(name)
    assert arrays.is_array(scales)
    scales = scales.float().reshape(-1)
    if scales.numel() not in (1, num_kv_heads) or not bool(
        ((scales > 0) & scales.isfinite()).all()
    ):
        raise CheckpointError(
            f"{name} holds {scales.numel()} scales where 1 or {num_kv_heads} positive ones are"
            " expected; quantize the model again"
        )
    return scales.expand((num_kv_heads,))
