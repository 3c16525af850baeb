"""Bounds that a tower's linears clip their inputs and outputs to, in either executor.

Imports torch for the torch executor alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from appliance.errors import UnsupportedModelError
from appliance.kernels import arrays
from appliance.kernels.weights.weight import dense

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from appliance.kernels.cpu.structs import LayerStruct, LinearStruct
    from appliance.kernels.cpu.weights import WeightPacker
    from appliance.kernels.operations import Linear
    from appliance.model.layers import DecoderLayer
    from appliance.model.vision.source import TowerSource


class ClipBounds(NamedTuple):
    """Bounds of the linears of one input.

    Attributes:
        inputs: least and most.
        outputs: (2, out_features) float32, least and most of each.
    """

    inputs: tuple[float, float]
    outputs: NDArray[np.float32]

    def numbers(self, first: int, count: int) -> NDArray[np.float32]:
        """Return bounds of the inputs and of some outputs, as `ap_linear` has them."""
        outputs = self.outputs[:, first : first + count]
        return np.concatenate((self.inputs, outputs.ravel())).astype(np.float32)


@dataclass(frozen=True, slots=True)
class LayerBounds:
    """Bounds of a layer's linears, by the input that they share."""

    qkv: ClipBounds
    output: ClipBounds
    gate_up: ClipBounds
    down: ClipBounds

    def put(self, layer: LayerStruct, packer: WeightPacker) -> None:
        """Give them to a layer of the C library."""
        heads = layer.attention
        places = (
            (self.qkv, heads.qkv[: heads.num_qkv]),
            (self.output, (heads.output,)),
            (self.gate_up, (layer.gate, layer.up)),
            (self.down, (layer.down,)),
        )
        for bounds, linears in places:
            _put(bounds, linears, packer)

    def around(self, layer: DecoderLayer) -> DecoderLayer:
        """Return a layer of the torch executor whose linears clip."""
        from appliance.model.attention import Attention
        from appliance.model.layers import MLP, GatedLinear

        mixer, mlp = layer.mixer, layer.mlp
        assert isinstance(mixer, Attention)
        assert isinstance(mlp, MLP)
        middle = mlp.middle
        assert isinstance(middle, GatedLinear), "the backend fuses no gate"
        middle = replace(middle, gate_up=_clipped(middle.gate_up, self.gate_up))
        return replace(
            layer,
            mixer=replace(
                mixer,
                qkv=_clipped(mixer.qkv, self.qkv),
                output=_clipped(mixer.output, self.output),
            ),
            mlp=MLP(middle, _clipped(mlp.down, self.down)),
        )


def read_bounds(source: TowerSource) -> tuple[LayerBounds, ...]:
    """Read the bounds of a tower's layers; none if its linears do not clip.

    Raises:
        CheckpointError: one is missing.
        UnsupportedModelError: linears clip the same input to different bounds.
    """
    if not source.spec.clips:
        return ()
    return tuple(_of_layer(source, index) for index in range(len(source.layers.spec.layers)))


def _of_layer(source: TowerSource, index: int) -> LayerBounds:
    names = source.layers.family.names
    widen = source.weights.value_scale  # of what the linear behind the heads reads

    def of(parts: tuple[str, ...], scale: float = 1.0) -> ClipBounds:
        inputs, outputs = set[tuple[float, float]](), []
        for part in parts:
            name = names.in_layer(index, part)
            width = source.weights.shape(f"{name}.weight")[0]
            ends = [_number(source, name, end) for end in ("input_min", "input_max")]
            inputs.add((ends[0] * scale, ends[1] * scale))
            own = [_number(source, name, end) for end in ("output_min", "output_max")]
            outputs.append(np.repeat(np.array(own, np.float32)[:, None], width, 1))
        if len(inputs) > 1:
            raise UnsupportedModelError(
                f"layer {index} of the vision tower clips the inputs of {', '.join(parts)} to"
                " different bounds, which is not computed here; serve the model with --no-images"
            )
        return ClipBounds(inputs.pop(), np.concatenate(outputs, 1))

    return LayerBounds(
        of(names.qkv), of((names.output,), widen), of(names.gate_up), of((names.down,))
    )


def _number(source: TowerSource, linear: str, end: str) -> float:
    """Read a bound, which lies beside the linear that it is of."""
    found = dense(source.weights.load(f"{linear.rpartition('.')[0]}.{end}"), "float32")
    return float(found.reshape(-1)[0])


def _put(bounds: ClipBounds, linears: Any, packer: WeightPacker) -> None:
    first = 0
    linear: LinearStruct
    for linear in linears:
        numbers = bounds.numbers(first, linear.out_features)
        linear.bounds = packer.floats(arrays.of_numpy(numbers))
        first += linear.out_features


@dataclass(frozen=True, slots=True)
class ClippedLinear:
    """A linear in torch that clips its inputs and outputs."""

    linear: Linear
    inputs: tuple[float, float]
    least: Any  # (out_features,)
    most: Any

    @property
    def in_features(self) -> int:
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        return self.linear.out_features

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes

    def __call__(self, x: Any) -> Any:
        """Map x (num_tokens, in_features) to (num_tokens, out_features)."""
        y = self.linear(x.clamp(*self.inputs))
        return y.clamp(self.least.to(y), self.most.to(y))


def _clipped(linear: Linear, bounds: ClipBounds) -> ClippedLinear:
    import torch

    least, most = torch.from_numpy(bounds.outputs)
    return ClippedLinear(linear, bounds.inputs, least, most)
