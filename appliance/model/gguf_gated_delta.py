"""Restores the Hugging Face order of Gated DeltaNet's tensors from GGUF files.

llama.cpp orders value heads by their place under a key head first, then by key head. Knows no
family.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.fp4 import Fp4Weight
from appliance.kernels.ggml import GgmlWeight
from appliance.kernels.packed import PackedWeight

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.kernels.weight import Weight
    from appliance.model.names import GatedDeltaNames
    from appliance.model.recurrent_spec import GatedDeltaSpec


def stored_rows(
    part: str, names: GatedDeltaNames, spec: GatedDeltaSpec
) -> NDArray[np.int64] | None:
    """Return each row's stored row, (out_features,) int64; None if the order is the same.

    `part` is the tensor's name in its layer, without `.weight`.
    """
    if part in (names.qkv, names.filter):
        before = 2 * spec.keys
        return np.concatenate((np.arange(before), before + _tiled(spec, spec.value_dim)))
    if part == names.gate:
        return _tiled(spec, spec.value_dim)
    if part in (names.share, names.decay, names.log_rates, names.decay_bias):
        return _tiled(spec, 1)
    return None


def as_in_checkpoints(
    tensor: Weight, part: str, names: GatedDeltaNames, spec: GatedDeltaSpec
) -> Weight:
    """Restore the order of the last linear's inputs.

    Packed columns keep their place and get an `input_order`.
    """
    if part != names.output:
        return tensor
    stored = _tiled(spec, spec.value_dim)
    if isinstance(tensor, PackedWeight | GgmlWeight):
        held = tensor.codes if isinstance(tensor, PackedWeight) else tensor.blocks
        order = arrays.like(held, stored.argsort().astype(np.int32))
        return replace(tensor, input_order=order)
    if isinstance(tensor, Fp4Weight):
        if spec.value_dim % tensor.group_size:
            return tensor.dequantize()[:, stored]
        heads = _tiled(spec, 1)
        return replace(
            tensor,
            codes=_of_heads(tensor.codes, heads),
            scale=arrays.viewed(
                _of_heads(arrays.viewed(tensor.scale, "uint8"), heads), tensor.scale.dtype
            ),
        )
    assert arrays.is_array(tensor), part
    return tensor[:, stored]


def _of_heads(columns: Tensor, order: NDArray[np.int64]) -> Tensor:
    """Reorder columns (out_features, heads * width) by head."""
    rows = columns.shape[0]
    ordered: Tensor = columns.reshape(rows, len(order), -1)[:, order].reshape(rows, -1)
    return ordered


def _tiled(spec: GatedDeltaSpec, width: int) -> NDArray[np.int64]:
    """Return each element's stored place; a value head has `width` elements."""
    shared = spec.num_value_heads // spec.num_key_heads
    stored = np.arange(spec.num_value_heads * width).reshape(shared, spec.num_key_heads, width)
    return stored.swapaxes(0, 1).reshape(-1)
