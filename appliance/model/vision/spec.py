"""A vision tower as plain frozen data: patches, positions, layers, and the way into a decoder.

The layers are those of a decoder whose rows see all others of their picture, and both executors of
decoders run them. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.kernels.activation import Activation
    from appliance.model.spec import DecoderSpec, NormSpec


class Resize(Enum):
    """Ways to fit a table of learned positions to a picture's grid of another size."""

    CORNERS = "corners"  # bilinear, corners on corners
    AREA = "area"  # bilinear between the middles of cells, over more of them where it shrinks
    BILINEAR = "bilinear"  # between the middles of cells
    BICUBIC = "bicubic"  # between the middles of cells, a = -0.75, borders repeated
    NEAREST = "nearest"  # the cell that a patch's corner lies in, as a share of its side


class SeesAhead(Enum):
    """The decoder's layers in which a row of a picture sees those of its picture that follow it."""

    NOWHERE = "in no layer"
    WINDOWS = "in layers with a window"
    EVERYWHERE = "in all layers"


@dataclass(frozen=True, slots=True)
class PositionTable:
    """Learned positions, (side * side, hidden_size), row by row.

    Attributes:
        name: of the tensor, in full; a tower's `first_row` has a position before them.
    """

    name: str
    side: int
    resize: Resize


@dataclass(frozen=True, slots=True)
class AxisTables:
    """Learned positions (2, count, hidden_size) of columns and of rows, which add up.

    Attributes:
        name: of the tensor, in full.
        axes_second: the tensor is (count, 2, hidden_size).
    """

    name: str
    count: int
    axes_second: bool = False


@dataclass(frozen=True, slots=True)
class PatchSpec:
    """The linear of a patch's pixels.

    Attributes:
        name: of the linear, without `.weight`.
        size: pixels of a side.
        frames: of a film that share a patch; a picture is its own frame so many times.
        channels_last: pixels are ordered by row, column, channel; else by channel, row, column.
        from_zero: pixels come from 0 to 1, and the linear takes them from -1 to 1.
        norm: of the pixels, before the linear; None without one.
        norm_name: without `.weight`.
    """

    name: str
    size: int
    bias: bool = True
    frames: int = 1
    channels_last: bool = False
    from_zero: bool = False
    norm: NormSpec | None = None
    norm_name: str = ""

    @property
    def inputs(self) -> int:
        return 3 * self.size * self.size


@dataclass(frozen=True, slots=True)
class ProjectorLinear:
    """A linear of a projector, and what follows it: act(norm(x)), or act(gate(x)) * x.

    Attributes:
        name: without `.weight`.
        gate: of another linear, whose activated output multiplies this one's; empty without one.
        norm: of the output, before the activation; None without one.
        norm_name: without `.weight`.
        stored_transposed: inputs before outputs, under the name alone.
        channels_first: inputs are ordered by channel, then by the patch's place in its cell.
    """

    name: str
    bias: bool = True
    activation: Activation | None = None
    stored_transposed: bool = False
    channels_first: bool = False
    gate: str = ""
    norm: NormSpec | None = None
    norm_name: str = ""


@dataclass(frozen=True, slots=True)
class ProjectorSpec:
    """The way from a tower's patches into a decoder's stream, cell by cell.

    y = linears(norm(patches of a cell, side by side)), or of their mean.

    Attributes:
        averages: a cell is the mean of its patches.
        scale: multiplies the mean.
        standard: of tensors of a bias, then subtracted, and a scale that multiplies the rest, the
            names in full without `bias` and `scale`; "" without them.
        norm: of a cell; None without one.
        norms_patches: it is of each patch instead, before they are side by side.
        norm_name: without `.weight`.
    """

    linears: tuple[ProjectorLinear, ...]
    averages: bool = False
    scale: float = 1.0
    standard: str = ""
    norm: NormSpec | None = None
    norm_name: str = ""
    norms_patches: bool = False


@dataclass(frozen=True, slots=True)
class PatchWindows:
    """Squares of a picture's cells, within which patches see each other in most layers.

    Attributes:
        cells: on a window's side; those at the right and at the bottom may be smaller.
        whole: layers in which patches see all of their picture.
    """

    cells: int
    whole: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextAxes:
    """Shares of time, height and width in the decoder's frequencies; see `RopeSpec`."""

    sections: tuple[int, int, int]
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """A vision tower.

    A cell is a square of patches that becomes one row of the decoder. Patches come cell by cell,
    cells row by row, so that cells are runs of rows.

    Attributes:
        layers: the tower's layers and last norm, as those of a decoder that only reads; perhaps no
            layers, where the projector reads the patches' embeddings.
        merge: patches on a cell's side.
        taps: of layers, by index, whose output goes through a projector of its own into what is
            added behind the decoder's first layers (DeepStack).
        rows_see_ahead: layers of the decoder whose rows see those of their picture behind them.
        text_axes: of a decoder whose rows have three positions; None if they have one.
        first_norm: of the patches' embeddings with their positions; None without one.
        first_norm_name: without `.weight`.
        positions_last: positions are added after the first norm.
        sum_norm: of embeddings and positions, behind positions that are added last; None without.
        sum_norm_name: without `.weight`.
        windows: None if patches see all of their picture in every layer.
        first_row: tensor of a row before each picture's patches that the projector does not read (a
            class token), whose position is the table's first; empty without one.
        scales: of a layer, vectors that multiply what attention says and what the MLP says, in full
            within the layer (layer scale, arXiv 2103.17239); None without.
        last_norm: the projector reads normed patches; otherwise the stream itself.
        turns_by_halves: stored heads have one half that rotates by columns, and one by rows.
        clips: linears of the layers clip what they read and write; see `clipping`.
    """

    layers: DecoderSpec
    patch: PatchSpec
    table: PositionTable | AxisTables | None
    merge: int
    projector: ProjectorSpec
    taps: tuple[tuple[int, ProjectorSpec], ...] = ()
    rows_see_ahead: SeesAhead = SeesAhead.NOWHERE
    text_axes: TextAxes | None = None
    first_norm: NormSpec | None = None
    first_norm_name: str = ""
    positions_last: bool = False
    sum_norm: NormSpec | None = None
    sum_norm_name: str = ""
    windows: PatchWindows | None = None
    first_row: str = ""
    scales: tuple[str, str] | None = None
    last_norm: bool = True
    turns_by_halves: bool = False
    clips: bool = False

    @property
    def runs(self) -> tuple[tuple[int, bool], ...]:
        """First layers of the runs of layers whose patches see alike, and if that is a window."""
        if not self.layers.layers:
            return ()
        if self.windows is None:
            return ((0, False),)
        whole = self.windows.whole
        in_windows = ((index, index not in whole) for index in range(len(self.layers.layers)))
        return tuple(next(run) for _, run in groupby(in_windows, key=itemgetter(1)))
