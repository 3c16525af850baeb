"""Reads a model's weights part by part and checks them, for any executor.

Knows no family and no file format.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.fp8 import Fp8Weight
from appliance.kernels.packed import PackedWeight
from appliance.model.linear import LinearPart
from appliance.model.norm import Norm

if TYPE_CHECKING:
    from appliance.kernels.weight import Weight
    from appliance.model.source import ModelSource
    from appliance.model.spec import LayerSpec, NormSpec

DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_DENSE_DTYPES = frozenset({*DTYPE_NAMES, torch.float64})


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """All weights of one layer; linears of one input are split as in the checkpoint."""

    qkv: list[LinearPart]  # rows of query heads, key heads, value heads, in this order
    output: LinearPart
    gate_up: list[LinearPart]  # rows of gate, then of up
    down: LinearPart
    attention_norm: Norm
    attention_post_norm: Norm | None
    mlp_norm: Norm
    mlp_post_norm: Norm | None
    query_norm: Norm | None
    key_norm: Norm | None


class ModelReader:
    """Reads parts of one source and counts their formats.

    Args:
        dtype: the type to hold weights in that are not packed.
    """

    def __init__(self, source: ModelSource, device: torch.device, dtype: torch.dtype) -> None:
        self._source = source
        self._names = source.family.names
        self._device = device
        self._dtype = dtype
        self._layer_formats: Counter[str] = Counter()  # bytes by format
        self._head_format = ""

    def layer(self, index: int) -> LayerWeights:
        """Read one layer."""
        spec, names = self._source.spec.layers[index], self._names
        attention = spec.attention
        return LayerWeights(
            qkv=self._parts(index, names.qkv, attention.qkv_bias),
            output=self._parts(index, (names.output,), attention.output_bias)[0],
            gate_up=self._parts(index, names.gate_up, spec.mlp.bias),
            down=self._parts(index, (names.down,), spec.mlp.bias)[0],
            attention_norm=self.first_norm(index),
            attention_post_norm=self._post_norm(index, names.attention_post_norm, spec),
            mlp_norm=self._norm(names.in_layer(index, names.mlp_norm), spec.norm),
            mlp_post_norm=self._post_norm(index, names.mlp_post_norm, spec),
            query_norm=self._head_norm(index, names.query_norm, attention.qk_norm),
            key_norm=self._head_norm(index, names.key_norm, attention.qk_norm),
        )

    def first_norm(self, index: int) -> Norm:
        """Read the norm at the start of a layer; past the last layer, the decoder's own."""
        spec = self._source.spec
        if index == len(spec.layers):
            return self._norm(self._names.final_norm, spec.final_norm)
        name = self._names.in_layer(index, self._names.attention_norm)
        return self._norm(name, spec.layers[index].norm)

    def embedding_and_head(self) -> tuple[Weight, Weight]:
        """Read embedding and head, (vocab_size, hidden_size); the same object if they are tied."""
        embedding = self._load(f"{self._names.embedding}.weight")
        head = embedding
        if not self._source.spec.tied_head:
            head = self._load(f"{self._names.head}.weight")
        self._head_format = self._format(head)
        return embedding, head

    def weight_format(self) -> str:
        """Describe the formats of the weights read: layers by frequency, then the head."""
        formats = [name for name, _ in self._layer_formats.most_common()]
        if formats == [self._head_format]:
            return self._head_format
        _, bracket, group = formats[0].partition(" (")
        head = self._head_format.removesuffix(bracket + group)
        return f"{' + '.join(formats)}, head {head}"

    def _parts(self, index: int, sources: tuple[str, ...], bias: bool) -> list[LinearPart]:
        parts = []
        for source in sources:
            name = self._names.in_layer(index, source)
            weight = self._load(f"{name}.weight")
            parts.append(LinearPart(weight, self._dense(f"{name}.bias") if bias else None))
            self._layer_formats[self._format(weight)] += weight.nbytes
        return parts

    def _head_norm(self, index: int, part: str, spec: NormSpec | None) -> Norm | None:
        return None if spec is None else self._norm(self._names.in_layer(index, part), spec)

    def _post_norm(self, index: int, part: str, layer: LayerSpec) -> Norm | None:
        if not layer.post_norms:
            return None
        return self._norm(self._names.in_layer(index, part), layer.norm)

    def _norm(self, name: str, spec: NormSpec) -> Norm:
        return Norm(self._dense(f"{name}.weight").float() + spec.offset, spec.eps)

    def _dense(self, name: str) -> Tensor:
        tensor = self._load(name)
        assert isinstance(tensor, Tensor), f"{name} is quantized"
        return tensor

    def _load(self, name: str) -> Weight:
        tensor = self._source.weights.load(name)
        if isinstance(tensor, PackedWeight):
            tensor = tensor.to(self._device)
            finite = is_finite(tensor.scale) and is_finite(tensor.offset)
        elif isinstance(tensor, Fp8Weight):
            tensor = tensor.to(self._device)
            finite = tensor.is_finite()
        else:
            if tensor.dtype not in _DENSE_DTYPES:
                raise UnsupportedModelError(
                    f"{self._source.path.name}: tensor {name} has type {tensor.dtype}, but "
                    "config.json has no quantization_config that says what it means"
                )
            tensor = tensor.to(self._device)
            finite = is_finite(tensor)
        if not finite:
            raise CheckpointError(
                f"{self._source.path.name}: tensor {name} holds NaN or infinity; "
                "fetch or quantize the model again"
            )
        return tensor

    def _format(self, weight: Weight) -> str:
        if isinstance(weight, PackedWeight):
            if weight.group_size == weight.shape[1]:
                return f"{weight.bits} bits (a scale per row)"
            return f"{weight.bits} bits (groups of {weight.group_size})"
        dense = DTYPE_NAMES[self._dtype]
        if not isinstance(weight, Fp8Weight):
            return dense
        # No CPU kernel multiplies e4m3, and float32 activations are for checking.
        is_held = self._device.type == "cuda" and self._dtype != torch.float32
        return "fp8" if is_held else f"fp8 (held as {dense})"


def is_finite(tensor: Tensor) -> bool:
    """Return True if no element is NaN or infinite.

    The sum decides nearly all cases, many times faster than a check of each element.
    """
    if bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
        return True
    return bool(torch.isfinite(tensor).all())
