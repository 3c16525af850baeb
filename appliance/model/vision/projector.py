"""Patches into a tower's stream, and out of it into a decoder's: on arrays of either kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.activation import Activation
from appliance.kernels.weights.weight import dense
from appliance.model.vision.positions import fitted
from appliance.model.vision.spec import AxisTables, PositionTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from appliance.model.spec import NormSpec
    from appliance.model.vision.source import TowerSource
    from appliance.model.vision.spec import PatchSpec, ProjectorLinear, ProjectorSpec, TowerSpec

    # Lays out a weight (out_features, in_features) and a bias, or None.
    MakeLinear = Callable[[Any, Any], Callable[[Any], Any]]

CELLS_AT_ONCE = 128  # of a projector, whose intermediate results are several times as wide
# Abramowitz and Stegun, 7.1.26: within 1.5e-7 of erf.
_P = 0.3275911
_QUICK = 1.702
_TERMS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


@dataclass(frozen=True, slots=True)
class CellNorm:
    """RMSNorm, or LayerNorm with a bias, of rows."""

    weight: Any
    bias: Any | None
    eps: float

    def __call__(self, x: Any) -> Any:
        if self.bias is not None:
            x = x - x.mean(-1, keepdims=True)
        scaled = x / ((x * x).mean(-1, keepdims=True) + self.eps) ** 0.5 * self.weight
        return scaled if self.bias is None else scaled + self.bias

    @classmethod
    def of(cls, source: TowerSource, name: str, spec: NormSpec) -> CellNorm:
        if not spec.weight:
            return cls(1.0, None, spec.eps)
        weight = source.floats(f"{name}.weight") + spec.offset
        has_bias = spec.centered and spec.bias
        bias = source.floats(f"{name}.bias") if has_bias else None
        return cls(weight, bias, spec.eps)


@dataclass(frozen=True, slots=True)
class ProjectorStep:
    """A linear and what follows it; see `ProjectorLinear`."""

    linear: Callable[[Any], Any]
    gate: Callable[[Any], Any] | None
    norm: CellNorm | None
    activation: Activation | None

    def __call__(self, x: Any) -> Any:
        """Map cells (num_cells, inputs) to (num_cells, outputs)."""
        y = self.linear(x)
        if self.gate is not None:
            return activated(self.gate(x), self.activation) * y
        return activated(y if self.norm is None else self.norm(y), self.activation)

    @classmethod
    def of(
        cls, source: TowerSource, spec: ProjectorLinear, merge: int, make: MakeLinear
    ) -> ProjectorStep:
        gate = None
        if spec.gate:
            gate = _linear(source, replace(spec, name=spec.gate), merge, make)
        norm = None if spec.norm is None else CellNorm.of(source, spec.norm_name, spec.norm)
        return cls(_linear(source, spec, merge, make), gate, norm, spec.activation)


@dataclass(frozen=True, slots=True)
class Projector:
    """Maps a tower's normed patches to rows of a decoder; see `ProjectorSpec`.

    Attributes:
        scale: of a mean; a number, or one for each element.
        bias: added then.
    """

    merge: int
    spec: ProjectorSpec
    scale: Any
    bias: Any
    norm: CellNorm | None
    steps: tuple[ProjectorStep, ...]

    def __call__(self, patches: Any) -> Any:
        """Map patches (num_patches, hidden_size), cell by cell, to (num_cells, width)."""
        at_once = CELLS_AT_ONCE * self.merge**2
        firsts = range(0, len(patches), at_once)
        return arrays.cat([self._cells(patches[first : first + at_once]) for first in firsts])

    def _cells(self, patches: Any) -> Any:
        count, width = patches.shape
        if self.norm is not None and self.spec.norms_patches:
            patches = self.norm(patches)
        cells = patches.reshape(count // self.merge**2, -1)
        if self.spec.averages:
            cells = cells.reshape(len(cells), -1, width).mean(1) * self.scale + self.bias
        if self.norm is not None and not self.spec.norms_patches:
            cells = self.norm(cells)
        for step in self.steps:
            cells = step(cells)
        return cells

    @classmethod
    def of(
        cls, source: TowerSource, spec: ProjectorSpec, merge: int, make: MakeLinear
    ) -> Projector:
        norm = None if spec.norm is None else CellNorm.of(source, spec.norm_name, spec.norm)
        steps = tuple(ProjectorStep.of(source, one, merge, make) for one in spec.linears)
        scale: Any = spec.scale
        bias: Any = 0.0
        if spec.standard:
            factor, least = (source.floats(spec.standard + part) for part in ("scale", "bias"))
            scale, bias = factor * spec.scale, -least * factor
        return cls(merge, spec, scale, bias, norm, steps)


@dataclass(frozen=True, slots=True)
class PatchEmbedding:
    """Maps pixels to the tower's stream, with each patch's position.

    Attributes:
        table: in NumPy, (side, side, hidden_size), or (2, count, hidden_size) of columns and of
            rows; None without one.
        of_pixels: the norm before the linear.
        of_sum: the norm behind positions that are added last.
        first_row: (1, hidden_size), before each picture's patches; None without one.
        like: an array of the kind that it works on.
    """

    spec: TowerSpec
    linear: Callable[[Any], Any]
    table: NDArray[np.float32] | None
    norm: CellNorm | None
    first_row: Any | None
    like: Any
    of_pixels: CellNorm | None = None
    of_sum: CellNorm | None = None

    def __call__(
        self, patches: NDArray[np.float32], places: NDArray[np.int64], grid: tuple[int, int]
    ) -> Any:
        """Map patches (num_patches, inputs) to (num_rows, hidden_size).

        Args:
            places: row and column of each patch, (2, num_patches).
            grid: rows and columns of the picture.
        """
        pixels = arrays.like(self.like, patches)
        stream = self.linear(pixels if self.of_pixels is None else self.of_pixels(pixels))
        if self.norm is not None and self.spec.positions_last:
            stream = self.norm(stream)
        if self.table is not None:
            if isinstance(self.spec.table, PositionTable):
                positions = fitted(self.table, *grid, self.spec.table.resize)[places[0], places[1]]
            else:
                positions = self.table[0, places[1]] + self.table[1, places[0]]
            stream = stream + arrays.like(self.like, positions)
        if self.norm is not None and not self.spec.positions_last:
            stream = self.norm(stream)
        if self.of_sum is not None:
            stream = self.of_sum(stream)
        return stream if self.first_row is None else arrays.cat([self.first_row, stream])

    @classmethod
    def of(cls, source: TowerSource, make: MakeLinear) -> PatchEmbedding:
        spec = source.spec
        weight = _patch_weight(source.floats(f"{spec.patch.name}.weight"), spec.patch)
        bias = source.floats(f"{spec.patch.name}.bias") if spec.patch.bias else None
        if spec.patch.from_zero:  # 2 x - 1
            weight, bias = 2 * weight, -weight.sum(1) if bias is None else bias - weight.sum(1)
        table, first = None, source.floats(spec.first_row) if spec.first_row else None
        if spec.table is not None:
            # Stays in NumPy, which fits it to each picture.
            table = np.asarray(dense(source.weights.load(spec.table.name), "float32"))
        if table is not None and isinstance(spec.table, PositionTable):
            rows, side = table.reshape(-1, spec.layers.hidden_size), spec.table.side
            if first is not None:
                first = first.reshape(1, -1) + arrays.like(first, rows[:1])
            table = rows[-side * side :].reshape(side, side, -1)
        elif table is not None and isinstance(spec.table, AxisTables) and spec.table.axes_second:
            table = table.swapaxes(0, 1)
        norms = (
            (spec.first_norm, spec.first_norm_name),
            (spec.patch.norm, spec.patch.norm_name),
            (spec.sum_norm, spec.sum_norm_name),
        )
        norm, of_pixels, of_sum = (
            None if one is None else CellNorm.of(source, name, one) for one, name in norms
        )
        return cls(spec, make(weight, bias), table, norm, first, weight, of_pixels, of_sum)


def _patch_weight(weight: Any, spec: PatchSpec) -> Any:
    """Return the linear of a patch, (hidden_size, inputs); a picture's frames are all the same."""
    if spec.channels_last:
        return weight.reshape(len(weight), -1)
    frames = weight.reshape(len(weight), 3, spec.frames, spec.size * spec.size)
    return frames.sum(2).reshape(len(weight), -1)


def _linear(
    source: TowerSource, spec: ProjectorLinear, merge: int, make: MakeLinear
) -> Callable[[Any], Any]:
    if spec.stored_transposed:
        weight = source.floats(spec.name).swapaxes(0, 1)
        return make(weight, None)
    weight = source.floats(f"{spec.name}.weight")
    if spec.channels_first:
        places = weight.reshape(len(weight), -1, merge**2)
        weight = places.swapaxes(1, 2).reshape(len(weight), -1)
    bias = source.floats(f"{spec.name}.bias") if spec.bias else None
    return make(weight, bias)


def activated(x: Any, activation: Activation | None) -> Any:
    """Apply an activation to an array (rows, columns) of either kind."""
    if activation is None:
        return x
    if not isinstance(x, np.ndarray):
        from torch.nn import functional

        approximate = "tanh" if activation is Activation.GELU_TANH else "none"
        if activation in (Activation.GELU, Activation.GELU_TANH):
            return functional.gelu(x, approximate=approximate)
        if activation is Activation.QUICK_GELU:
            return x * (_QUICK * x).sigmoid()
        return {Activation.SILU: functional.silu, Activation.RELU: functional.relu}[activation](x)
    return _IN_NUMPY[activation](x)


def _gelu(x: Any) -> Any:
    size = np.abs(x) * np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(_P) * size)
    series = np.zeros_like(t)
    for term in reversed(_TERMS):
        series = (series + np.float32(term)) * t
    erf = np.copysign(1 - series * np.exp(-size * size), x)
    return x * (np.float32(0.5) * (1 + erf))


def _gelu_tanh(x: Any) -> Any:
    inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x**3)
    return x * (np.float32(0.5) * (1 + np.tanh(inner)))


_IN_NUMPY: dict[Activation, Callable[[Any], Any]] = {
    Activation.GELU: _gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.SILU: lambda x: x / (1 + np.exp(-x)),
    Activation.RELU: lambda x: np.maximum(x, 0),
    Activation.QUICK_GELU: lambda x: x / (1 + np.exp(-_QUICK * x)),
}
