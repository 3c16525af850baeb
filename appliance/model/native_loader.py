"""Loads a model for the CPU library: reads each layer, cuts a rank's part out, lays it out."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol

from appliance.kernels.arrays import dtype_name
from appliance.kernels.cpu.arena import Arena
from appliance.kernels.cpu.parts import LibraryLinear
from appliance.kernels.cpu.structs import (
    LayerStruct,
)
from appliance.kernels.cpu.weights import WeightPacker
from appliance.model.native import NativeDecoder
from appliance.model.native_layout import lay_out_layer, lay_out_model, lay_out_ropes
from appliance.model.reader import ModelReader
from appliance.model.shard.stage import Stage
from appliance.model.shard.weights import WeightCutter
from appliance.model.tensor_reader import load_checked

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.kernels.cpu.structs import ModelStruct
    from appliance.model.names import JoinNames
    from appliance.model.shard.shard import Part
    from appliance.model.source import ModelSource
    from appliance.model.tensors import Role


class KeptWeights(Protocol):
    """A place that keeps packed weights; see `appliance.kernels.cpu.packed_file`."""

    def find(
        self, layout: str, engine: NativeEngine
    ) -> tuple[Arena, ModelStruct, dict[str, Any]] | None:
        """Map the weights of a layout, if they are kept: the model has no RoPEs."""
        ...

    def keep(
        self,
        layout: str,
        engine: NativeEngine,
        arena: Arena,
        model: ModelStruct,
        about: dict[str, Any],
    ) -> None:
        """Keep the weights of a layout for the next start."""
        ...


def load_native(
    source: ModelSource,
    engine: NativeEngine,
    dtype: Any,
    on_progress: Callable[[str, int, int], None] | None = None,
    *,
    context_length: int | None = None,
    part: Part | None = None,
    target: NativeDecoder | None = None,
    shared: Collection[Role] = (),
    join: JoinNames | None = None,
    kept: KeptWeights | None = None,
) -> NativeDecoder:
    """Read all weights and lay them out, or map them as they were laid out before.

    Args:
        source: a model for which `why_unsupported` returns None.
        engine: lays out the weights and later executes them.
        dtype: of unpacked weights.
        on_progress: called with a stage, the number of parts done, and their total.
        context_length: most tokens of a sequence; by default the model's own.
        part: a rank's part of the model; None is all of it.
        target: the model that a head drafts for; it must outlive the result.
        shared: matrices that such a head shares with it, embedding or output matrix.
        join: names of the parts that join such a head's embedding and hidden state.
        kept: of a model without `target`; where it is kept as laid out.

    Raises:
        CheckpointError: a weight holds NaN or infinity.
        MemoryError: the system has too little memory for the weights.
    """
    report = on_progress or (lambda stage, done, total: None)
    own = Stage.whole_of(source.spec) if part is None else part
    count = len(own.spec.layers)
    length = own.spec.context_length if context_length is None else context_length
    layout = "" if kept is None else _layout(source, own, dtype)
    report("weights", 0, count + 1)
    if kept is not None and (found := kept.find(layout, engine)) is not None:
        arena, model, about = found
        model.ropes = lay_out_ropes(WeightPacker(engine, arena, dtype), own.spec, length)
        report("weights", count + 1, count + 1)
        return NativeDecoder(
            spec=own.spec, dtype=dtype, engine=engine, model=model, arena=arena, part=part, **about
        )
    reader = ModelReader(source, None, dtype, native=True)
    cutter = WeightCutter(own)
    packer = WeightPacker(engine, Arena(), dtype)
    layers = (LayerStruct * count)()
    for index in range(count):
        weights = cutter.layer(reader.layer(own.layers[0] + index), index)
        layers[index] = lay_out_layer(packer, weights, own, index)
        del weights  # before the next layer's are read
        report("weights", index + 1, count + 1)
    ends = cutter.ends(reader.ends(own, () if target is None else shared, join))
    beside = None if target is None else target.model
    model = lay_out_model(packer, own, layers, ends, length, joins=join, beside=beside)
    about = {"weight_format": reader.weight_format(), "num_dense": cutter.num_dense}
    if kept is not None:
        kept.keep(layout, engine, packer.arena, model, about)
    report("weights", count + 1, count + 1)
    return NativeDecoder(
        spec=own.spec,
        dtype=dtype,
        engine=engine,
        model=model,
        arena=packer.arena,
        part=part,
        **about,
    )


def _layout(source: ModelSource, own: Part, dtype: Any) -> str:
    """Hash what decides how weights are laid out, beside their file: also what rounds them."""
    digest = hashlib.blake2b(f"{own!r} {dtype_name(dtype)}".encode(), digest_size=16)
    weights = source.weights
    for slot in source.slots():
        if not slot.expert:  # all experts of a layer are rounded alike
            name = slot.name
            form = weights.packed_bits(name), weights.group_size(name), weights.float_bits(name)
            digest.update(f"{name} {form}".encode())
    return digest.hexdigest()


def load_linear(source: ModelSource, name: str, engine: NativeEngine, dtype: Any) -> LibraryLinear:
    """Lay out one linear without a bias, by its full name without `.weight`.

    Raises:
        CheckpointError: it holds NaN or infinity.
        MemoryError: the system has too little memory for it.
    """
    packer = WeightPacker(engine, Arena(), dtype)
    linear = packer.linear(load_checked(source, f"{name}.weight", None))
    return LibraryLinear(engine, linear, packer.arena)
