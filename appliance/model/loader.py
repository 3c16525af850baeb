"""Builds a decoder from a model source, layer by layer.

What is read is laid out for the backend and let go at once, so that the most memory in use is
about the finished model and one layer. Knows no family and no file format.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.packed import PackedWeight
from appliance.kernels.packed_matmul.reference import DenseLinear
from appliance.model.attention import Attention
from appliance.model.decoder import Decoder
from appliance.model.embedding import Embedding
from appliance.model.layers import MLP, DecoderLayer
from appliance.model.linear import LinearPart, prepare_fused
from appliance.model.norm import Norm
from appliance.model.rope import Rope

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.kernels.backend import Backend, Linear
    from appliance.model.source import ModelSource
    from appliance.model.spec import LayerSpec, NormSpec, RopeSpec

DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_DENSE_DTYPES = frozenset({*DTYPE_NAMES, torch.float64})


def load_decoder(
    source: ModelSource,
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[str, int, int], None] | None = None,
    *,
    context_length: int | None = None,
) -> Decoder:
    """Read all weights and lay them out.

    Args:
        source: an opened and checked model.
        backend: lays out the weights and later executes them.
        device: where they go.
        dtype: of activations, and of weights that are not packed.
        on_progress: called with a stage, the parts done and the parts there are.
        context_length: most tokens of a sequence; the model's own by default. Some models
            rotate differently where it is above the context they were trained with.

    Raises:
        CheckpointError: a weight holds NaN or infinity.
        UnsupportedModelError: a weight that is not packed has a type of less than 16 bits.
    """
    loader = _Loader(source, backend, device, dtype)
    report = on_progress or (lambda stage, done, total: None)
    layers: list[DecoderLayer] = []
    total = len(source.spec.layers) + 1
    report("weights", 0, total)
    first_norm = loader.first_norm(0)
    for index in range(len(source.spec.layers)):
        layers.append(loader.layer(index))
        report("weights", index + 1, total)
    embedding, head = loader.embedding_and_head()
    report("weights", total, total)
    length = source.spec.context_length if context_length is None else context_length
    return Decoder(
        spec=source.spec,
        backend=backend,
        dtype=dtype,
        device=device,
        embedding=embedding,
        ropes=tuple(Rope.of(spec, length, device) for spec in loader.ropes),
        first_norm=first_norm,
        layers=tuple(layers),
        head=head,
        weight_bytes=loader.nbytes,
        weight_format=loader.weight_format(),
    )


class _Loader:
    """Reads parts of one source and keeps account of them."""

    def __init__(
        self, source: ModelSource, backend: Backend, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.ropes: list[RopeSpec] = []  # the distinct ones, in order of appearance
        self.nbytes = 0
        self._source = source
        self._names = source.family.names
        self._backend = backend
        self._device = device
        self._dtype = dtype
        self._layer_formats: Counter[str] = Counter()  # bytes by format
        self._head_format = ""

    def layer(self, index: int) -> DecoderLayer:
        """Everything of one layer, and the norm that comes after it."""
        spec, names = self._source.spec.layers[index], self._names
        return DecoderLayer(
            backend=self._backend,
            attention=self._attention(index, spec),
            mlp=MLP(
                backend=self._backend,
                activation=spec.mlp.activation,
                gate_up=self._linear(index, names.gate_up, spec.mlp.bias),
                down=self._linear(index, (names.down,), spec.mlp.bias),
            ),
            mlp_norm=self._norm(names.in_layer(index, names.mlp_norm), spec.norm),
            next_norm=self.first_norm(index + 1),
            attention_post_norm=self._post_norm(index, names.attention_post_norm, spec),
            mlp_post_norm=self._post_norm(index, names.mlp_post_norm, spec),
        )

    def first_norm(self, index: int) -> Norm:
        """The norm at the start of a layer; past the last layer, the decoder's own."""
        spec = self._source.spec
        if index == len(spec.layers):
            return self._norm(self._names.final_norm, spec.final_norm)
        name = self._names.in_layer(index, self._names.attention_norm)
        return self._norm(name, spec.layers[index].norm)

    def embedding_and_head(self) -> tuple[Embedding, Linear]:
        """The two ends; one tensor, read once, if they are tied."""
        spec = self._source.spec
        matrix = self._load(f"{self._names.embedding}.weight")
        embedding = Embedding.of(matrix, spec.embedding_scale, self._dtype)
        if not spec.tied_head:
            matrix = self._load(f"{self._names.head}.weight")
        elif isinstance(embedding.weight, Tensor):
            matrix = embedding.weight  # one copy, where the backend keeps it as it is
        head = self._backend.prepare_linear(matrix, None, self._dtype)
        self._head_format = self._format(matrix)
        is_shared = isinstance(head, DenseLinear) and head.weight is embedding.weight
        self.nbytes += head.nbytes + (0 if is_shared else embedding.nbytes)
        return embedding, head

    def weight_format(self) -> str:
        """How the weights were stored, the most common format first."""
        layers = " + ".join(name for name, _ in self._layer_formats.most_common())
        return layers if layers == self._head_format else f"{layers} + {self._head_format} head"

    def _attention(self, index: int, layer: LayerSpec) -> Attention:
        spec, names = layer.attention, self._names
        if spec.rope not in self.ropes:
            self.ropes.append(spec.rope)
        query_norm = key_norm = None
        if spec.qk_norm is not None:
            query_norm = self._norm(names.in_layer(index, names.query_norm), spec.qk_norm)
            key_norm = self._norm(names.in_layer(index, names.key_norm), spec.qk_norm)
        return Attention(
            spec=spec,
            backend=self._backend,
            rope=self.ropes.index(spec.rope),
            qkv=self._linear(index, names.qkv, spec.qkv_bias),
            output=self._linear(index, (names.output,), spec.output_bias),
            query_norm=query_norm,
            key_norm=key_norm,
        )

    def _linear(self, index: int, sources: tuple[str, ...], bias: bool) -> Linear:
        """A linear of a layer, from one weight or from several stacked."""
        parts = []
        for source in sources:
            name = self._names.in_layer(index, source)
            weight = self._load(f"{name}.weight")
            parts.append(LinearPart(weight, self._dense(f"{name}.bias") if bias else None))
            self._layer_formats[self._format(weight)] += weight.nbytes
        linear = prepare_fused(parts, self._backend, self._dtype)
        self.nbytes += linear.nbytes
        return linear

    def _post_norm(self, index: int, part: str, layer: LayerSpec) -> Norm | None:
        if not layer.post_norms:
            return None
        return self._norm(self._names.in_layer(index, part), layer.norm)

    def _norm(self, name: str, spec: NormSpec) -> Norm:
        weight = self._dense(f"{name}.weight").float() + spec.offset
        self.nbytes += weight.nbytes
        return Norm(weight, spec.eps)

    def _dense(self, name: str) -> Tensor:
        tensor = self._load(name)
        assert isinstance(tensor, Tensor), f"{name} is packed"
        return tensor

    def _load(self, name: str) -> Tensor | PackedWeight:
        """Read one tensor onto the device, checked."""
        tensor = self._source.weights.load(name)
        if isinstance(tensor, PackedWeight):
            tensor = replace(
                tensor,
                codes=tensor.codes.to(self._device),
                scale=tensor.scale.to(self._device),
                offset=tensor.offset.to(self._device),
            )
            finite = is_finite(tensor.scale) and is_finite(tensor.offset)
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

    def _format(self, weight: Tensor | PackedWeight) -> str:
        if isinstance(weight, PackedWeight):
            return f"{weight.bits}-bit g{weight.group_size}"
        return DTYPE_NAMES[self._dtype]


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite.

    The sum is enough to tell in nearly all cases, and many times faster than a look at each.
    """
    if bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
        return True
    return bool(torch.isfinite(tensor).all())
