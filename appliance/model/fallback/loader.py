"""Lays a checkpoint out in transformers' modules: linears and embeddings in the engine's form."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from appliance.kernels import arrays
from appliance.kernels.weights.weight import dense
from appliance.model.fallback.decoder import FallbackDecoder
from appliance.model.fallback.description import (
    body_of,
    has_inputs_first,
    is_embedding,
    is_linear,
)
from appliance.model.fallback.experts import (
    DOWN,
    GATE,
    UP,
    LaidOutExperts,
    are_apart,
    has_experts,
    stacked_parts,
)
from appliance.model.fallback.matrices import name_of
from appliance.model.fallback.modules import (
    LaidOutEmbedding,
    LaidOutLinear,
    NoDropout,
    WeightType,
    fill_buffers,
    put_identity,
)
from appliance.model.fallback.own_cache import (
    Attributes,
    OwnCacheDecoder,
    begin,
    goes_on_with_several,
)
from appliance.model.linear import ConcatenatedLinear, LinearPart, stack_neighbours
from appliance.model.tensor_reader import FormatCounts, format_of, load_checked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from appliance.kernels.operations import Linear
    from appliance.kernels.weights.weight import Weight
    from appliance.model.fallback.operations import Operations
    from appliance.model.source import ModelSource


def _ignore() -> None:
    pass


def load_fallback(
    source: ModelSource,
    operations: Operations,
    dtype: torch.dtype,
    on_progress: Callable[[str, int, int], None] | None = None,
    on_layer: Callable[[], None] = _ignore,
) -> FallbackDecoder | OwnCacheDecoder:
    """Read all weights and lay them out.

    Args:
        source: an opened and checked model, described by transformers.
        operations: hold the weights, and later attend.
        dtype: of weights that are not packed.
        on_progress: called with a stage, the number of parts done, and their total.
        on_layer: called in each layer of a step.

    Raises:
        CheckpointError: a weight holds NaN or infinity.
        UnsupportedModelError: a buffer that no checkpoint holds has no value, or answers would
            depend on how a text is cut.
    """
    assert source.fallback is not None
    model = source.fallback.build()
    fill_buffers(model, operations.device)
    layout = _Layout(source, operations, dtype, on_progress or (lambda stage, done, total: None))
    layout.lay_out(model)
    if source.spec.own_cache is not None:
        return _with_own_caches(source, model, operations, layout, on_layer)
    modules = dict(model.named_modules())
    names = zip(source.fallback.attention, itertools.count())
    places = {modules[name]: (i, source.spec.attention_layers[i]) for name, i in names}
    body = body_of(model, is_whole=source.fallback.is_whole)
    put_identity(model)
    return FallbackDecoder(
        spec=source.spec,
        operations=operations,
        body=body,
        head=model,
        places=places,
        weight_bytes=layout.nbytes,
        weight_format=layout.weight_format(),
        on_layer=on_layer,
    )


def _with_own_caches(
    source: ModelSource,
    model: Any,
    operations: Operations,
    layout: _Layout,
    on_pass: Callable[[], None],
) -> OwnCacheDecoder:
    assert source.fallback is not None
    modules = dict(model.named_modules())
    body = body_of(model, is_whole=source.fallback.is_whole)
    places = tuple((modules[name], attribute) for name, attribute in source.fallback.inside)
    first = tuple(getattr(module, name) for module, name in places)
    begun = replace(begin(model, body), inside=Attributes(places, first))
    put_identity(model)
    decoder = OwnCacheDecoder(
        spec=source.spec,
        operations=operations,
        begun=begun,
        head=model,
        weight_bytes=layout.nbytes,
        weight_format=layout.weight_format(),
        on_pass=on_pass,
    )
    several = goes_on_with_several(begun, source.spec.vocab_size, operations.device)
    return replace(decoder, several=several)


class _Layout:
    """Reads tensors one after another and puts them where they belong."""

    def __init__(
        self,
        source: ModelSource,
        operations: Operations,
        dtype: torch.dtype,
        report: Callable[[str, int, int], None],
    ) -> None:
        self.nbytes = 0
        assert source.fallback is not None
        self._source, self._fallback = source, source.fallback
        self._operations = operations
        self._dtype = dtype
        self._report = report
        self._formats = FormatCounts()
        self._first: dict[int, str] = {}  # of each parameter, its name in the checkpoint
        self._shared: dict[str, LaidOutLinear] = {}

    def lay_out(self, model: Any) -> None:
        """Fill a model without weights."""
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self._first = {id(parameter): name for name, parameter in model.named_parameters()}
        owners = list(model.named_modules())
        shared = None
        if head.weight is embedding.weight:
            shared = self._linear(self._source.family.names.embedding, head, is_head=True)
        for done, (name, module) in enumerate(owners):
            self._report("weights", done, len(owners))
            if module is head and shared is not None:
                _put(model, name, shared)
            elif is_linear(module) and name not in self._fallback.read:
                # Layers may share theirs, as Zamba's attention does: a checkpoint has them once.
                place = self._first[id(module.weight)].removesuffix(".weight")
                if place not in self._shared:
                    is_head = module is head
                    self._shared[place] = self._linear(place, module, is_head=is_head)
                _put(model, name, self._shared[place])
            elif has_experts(module):
                _put(model, name, self._experts(name, module))
            elif is_embedding(module):
                own = shared if module is embedding else None
                _put(model, name, self._embedding(name, module, own))
            elif isinstance(module, nn.Dropout):
                _put(model, name, NoDropout())
            else:
                self._parameters(name, module)
        self._report("weights", len(owners), len(owners))

    def weight_format(self) -> str:
        """Describe the formats of layers by frequency, then that of the head."""
        return self._formats.in_words()

    def _linear(self, name: str, module: Any, *, is_head: bool) -> LaidOutLinear:
        weight = self._load(f"{name}.weight")
        if has_inputs_first(module) and not self._fallback.is_one_by_one:
            weight = dense(weight, self._dtype).T.contiguous()
        added = None
        if module.bias is not None:
            added = self._dense(self._first[id(module.bias)], self._dtype)
        linear = self._operations.linear(weight, added)
        if is_head:
            device = self._operations.device
            self._formats.set_head(format_of(weight, self._dtype, device, native=False))
            self.nbytes += linear.nbytes
        else:
            self._count(weight, linear)
        return LaidOutLinear(linear, self._operations.dtype, self._operations.device)

    def _experts(self, name: str, module: Any) -> LaidOutExperts:
        into, out = stacked_parts(module)
        count = module.down_proj.shape[0]
        if are_apart(name, set(self._source.weights.tensor_names())):
            sides = self._apart(name, module, count)
        else:
            sides = self._stacked(name, module, into), self._stacked(name, module, out)
        return LaidOutExperts(*sides, module._apply_gate if module.has_gate else module.act_fn)

    def _apart(self, name: str, module: Any, count: int) -> tuple[list[Linear], list[Linear]]:
        """Lay out experts that are stored one by one."""
        inputs, outputs = [], []
        for expert in range(count):
            parts = [
                self._part(f"{name}.{expert}.{part}.weight")
                for part in ((GATE, UP) if module.has_gate else (UP,))
            ]
            sides = [stack_neighbours(parts), [self._part(f"{name}.{expert}.{DOWN}.weight")]]
            into, out = (self._fused(side) for side in sides)
            inputs.append(into)
            outputs.append(out)
        return inputs, outputs

    def _part(self, name: str) -> LinearPart:
        return LinearPart(self._load(name), None)

    def _stacked(self, name: str, module: Any, part: str) -> list[Linear]:
        """Lay out one side of experts that are stored in one tensor."""
        biases: list[Tensor | None] = [None] * module.down_proj.shape[0]
        if module.has_bias:
            biases = list(dense(self._load(f"{name}.{part}_bias"), self._dtype))
        weights = self._each(f"{name}.{part}", len(biases), is_transposed=module.is_transposed)
        each = zip(weights, biases, strict=True)
        return [self._fused([LinearPart(weight, bias)]) for weight, bias in each]

    def _each(self, name: str, count: int, *, is_transposed: bool) -> Iterator[Weight]:
        """Read the matrices of a stack, outputs first."""
        if self._fallback.is_one_by_one:
            yield from (self._load(name_of(name, number)) for number in range(count))
            return
        for weight in dense(self._load(name), self._dtype):
            yield (weight.T if is_transposed else weight).contiguous()

    def _fused(self, parts: list[LinearPart]) -> Linear:
        """Lay out parts that follow each other in one output."""
        linears = []
        for part in parts:
            linear = self._operations.linear(part.weight, part.bias)
            self._count(part.weight, linear)
            linears.append(linear)
        return linears[0] if len(linears) == 1 else ConcatenatedLinear(tuple(linears))

    def _count(self, weight: Weight, linear: Linear) -> None:
        format = format_of(weight, self._dtype, self._operations.device, native=False)
        self._formats.add(format, linear.nbytes)
        self.nbytes += linear.nbytes

    def _embedding(self, name: str, module: Any, shared: LaidOutLinear | None) -> LaidOutEmbedding:
        weight = self._load(f"{name}.weight")
        if shared is None:
            self.nbytes += _bytes_in(weight, self._dtype)
        linear = None if shared is None else shared.linear
        scale = getattr(module, "embed_scale", 1.0)
        kind = WeightType(self._operations.dtype, self._operations.device)
        return LaidOutEmbedding(self._operations.look_up(weight, linear), scale, kind)

    def _parameters(self, prefix: str, module: nn.Module) -> None:
        """Load what is neither a linear nor an embedding: norms, sinks, kept buffers."""
        dot, dtype = f"{prefix}." if prefix else "", self._operations.dtype
        for name, parameter in module._parameters.items():
            if parameter is not None:
                place = self._first.get(id(parameter), dot + name)
                own = dtype if parameter.is_floating_point() else parameter.dtype
                value = self._dense(place, own)
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                module._buffers[name] = self._dense(dot + name, buffer.dtype)

    def _dense(self, name: str, dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point:
            value: Tensor = dense(self._load(name), dtype)
        else:  # a table of numbers of things, such as experts by token
            table: Any = self._source.weights.load(name)
            value = table.to(self._operations.device).to(dtype)
        self.nbytes += value.nbytes
        return value

    def _load(self, name: str) -> Weight:
        return load_checked(self._source, name, self._operations.device)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _bytes_in(weight: Weight, dtype: torch.dtype) -> int:
    if arrays.is_array(weight):
        return int(weight.numel() * dtype.itemsize)
    return int(weight.nbytes)
