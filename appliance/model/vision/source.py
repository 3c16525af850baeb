"""Opens a checkpoint's vision tower: its description, and its tensors as executors take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from appliance.errors import CheckpointError
from appliance.kernels import arrays
from appliance.kernels.head_norms import HeadNormKind
from appliance.kernels.weights.weight import dense
from appliance.model.families.family import Family
from appliance.model.source import ModelSource
from appliance.model.spec import AttentionSpec
from appliance.model.text_part import TextPart
from appliance.model.vision.families.family import PROJECTOR, TOWER, made_names
from appliance.model.vision.families.registry import tower_family
from appliance.model.vision.mmproj import described_elsewhere, read_projector
from appliance.model.vision.spec import SeesAhead
from appliance.model_files.checkpoint import CONFIG_NAME, SafetensorsFolder, read_config
from appliance.quant.formats import open_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path
    from typing import Any

    import torch

    from appliance.model.spec import LayerSpec
    from appliance.model.vision.families.family import TowerFamily
    from appliance.model.vision.spec import TextAxes, TowerSpec
    from appliance.quant.formats import WeightReader


@dataclass(frozen=True, slots=True)
class TowerSource:
    """A tower whose weights can be read one by one.

    Attributes:
        layers: its layers as a decoder's, which the executors of decoders load.
        weights: of the layers and of all else.
        device: of torch, on which what is around the layers is computed; None: where it is read.
    """

    spec: TowerSpec
    layers: ModelSource
    weights: TowerWeights
    device: torch.device | None = None

    def floats(self, name: str) -> Any:
        """Read a tensor around the layers in float32."""
        found = dense(self.weights.load(name), "float32")
        return found if self.device is None else found.to(self.device)


def open_tower(path: Path, *, in_torch: bool = True) -> TowerSource | None:
    """Open the tower in a model's folder; None if its family's models have none.

    Args:
        in_torch: read tensors as torch's; otherwise as `HostArray`.

    Raises:
        CheckpointError: a setting is missing, or the tower's tensors are.
        UnsupportedModelError: a setting is not supported.
    """
    family = tower_family(read_config(path))
    if family is None:
        return None
    folder = SafetensorsFolder(path, in_torch=in_torch)
    spec = family.spec(folder.config, str(path / CONFIG_NAME))
    weights = open_weights(folder)
    stored = _stored_names(family, spec, weights.tensor_names())
    if not stored:
        patch = f"{spec.patch.name}.weight".removeprefix(TOWER)
        looked = ", ".join(f"{tower}{patch}" for tower, _ in family.places)
        raise CheckpointError(
            f"{path.name}: {CONFIG_NAME} describes a vision tower, and none of its tensors is"
            f" here: looked for {looked}; take the folder of the whole model, or serve it"
            " without pictures"
        )
    config = dict(folder.config.get("vision_config") or {})
    return _source_of(path, family, spec, TowerWeights(weights, family, spec, stored), config)


def tower_of(
    source: ModelSource, projector: Path | None, *, in_torch: bool = True
) -> TowerSource | None:
    """Open a model's tower, of its own folder or in a projector file; None if it has none.

    Raises:
        ModelError: as `open_tower` and `open_projector`.
    """
    if source.path.is_dir():
        return open_tower(source.path, in_torch=in_torch)
    return None if projector is None else open_projector(projector, source, in_torch=in_torch)


def open_projector(path: Path, text: ModelSource, *, in_torch: bool = True) -> TowerSource:
    """Open the tower in a GGUF projector file, for the text of a GGUF model.

    Raises:
        CheckpointError: the file is damaged, lacks something, or is of another model.
        UnsupportedModelError: its type or a setting is not supported.
    """
    family, spec, weights = read_projector(path, text, in_torch=in_torch)
    stored = {name: name for name in weights.tensor_names()}
    return _source_of(path, family, spec, TowerWeights(weights, family, spec, stored), {})


def _source_of(
    path: Path,
    family: TowerFamily,
    spec: TowerSpec,
    weights: TowerWeights,
    config: dict[str, Any],
) -> TowerSource:
    kind = next(iter(family.tower_types.values()))
    described = Family(family.name, kind, (), described_elsewhere, family.names)
    return TowerSource(spec, ModelSource(path, described, config, spec.layers, weights), weights)


def beside_tower(source: ModelSource, tower: TowerSource) -> ModelSource:
    """Return a decoder that rotates and sees the rows of pictures as the tower's family has it."""
    if isinstance(source.weights, TextPart):
        source = replace(source, weights=source.weights.beside(tower.weights.stored))
    if tower.spec.text_axes is not None:
        source = _with_mixers(source, partial(_turned, source, tower.spec.text_axes))
    if (ahead := tower.spec.rows_see_ahead) is not SeesAhead.NOWHERE:
        source = _with_mixers(source, partial(_seeing, ahead))
    return source


def _with_mixers(
    source: ModelSource, changed: Callable[[AttentionSpec], AttentionSpec]
) -> ModelSource:
    def with_mixer(layer: LayerSpec) -> LayerSpec:
        mixer = layer.mixer
        return replace(layer, mixer=changed(mixer)) if isinstance(mixer, AttentionSpec) else layer

    layers = tuple(map(with_mixer, source.spec.layers))
    return replace(source, spec=replace(source.spec, layers=layers))


def _turned(source: ModelSource, axes: TextAxes, mixer: AttentionSpec) -> AttentionSpec:
    rope = replace(mixer.rope, sections=axes.sections, interleaved=axes.interleaved)
    if len(rope.axes) != rope.rotary_dim // 2:
        raise CheckpointError(
            f"{source.path.name}: mrope_section {list(axes.sections)} is of another number of"
            f" frequencies than the {rope.rotary_dim // 2} of a head; take the config.json of"
            " its makers"
        )
    return replace(mixer, rope=rope)


def _seeing(ahead: SeesAhead, mixer: AttentionSpec) -> AttentionSpec:
    return replace(mixer, sees_picture=ahead is SeesAhead.EVERYWHERE or mixer.window is not None)


class TowerWeights:
    """A `WeightReader` of a tower's tensors, by the names of its family.

    Layer scales multiply the rows of the linears before them, and heads get elements that are 0
    where the description has wider ones than the checkpoint; such linears lose codes that they are
    stored in.

    Args:
        stored: names that `weights` knows, by the family's.

    Attributes:
        value_scale: of normed values, whose mean square is of wider heads than the checkpoint's;
            the linear behind them takes it out.
    """

    def __init__(
        self,
        weights: WeightReader,
        family: TowerFamily,
        spec: TowerSpec,
        stored: Mapping[str, str],
    ) -> None:
        self._weights, self._stored = weights, stored
        self._hidden_size = spec.layers.hidden_size
        attention = next(iter(spec.layers.attention_layers.values()), None)
        self._heads, self._width = 1, self._hidden_size
        if attention is not None:
            self._heads, self._width = attention.num_heads, attention.head_dim
        self._made = {
            name: made((*shape, self._hidden_size), np.float32)
            for name, made, shape in zip(
                made_names(family.names, spec), (np.zeros, np.ones), ((1,), ()), strict=False
            )
        }
        names, count = family.names, len(spec.layers.layers)
        self._turns_by_halves = spec.turns_by_halves
        narrow = self._hidden_size // self._heads
        self.value_scale = 1.0
        if attention is not None and attention.value_norm is not None:
            self.value_scale = (self._width / narrow) ** 0.5
        turning = names.qkv[:2] if spec.turns_by_halves else ()
        self._turning = {
            f"{names.in_layer(index, part)}.weight" for index in range(count) for part in turning
        }
        norms: tuple[str, ...] = ()
        if attention is not None and attention.qk_norm is not None:
            each = attention.head_norms is HeadNormKind.EACH
            norms = (names.query_norm, names.key_norm) if each else ()
        self._head_norms = {
            f"{names.in_layer(index, part)}.weight" for index in range(count) for part in norms
        }
        scaled = (names.output, names.down)
        self._scales = {
            f"{names.in_layer(index, name)}.{kind}": names.in_layer(index, scale)
            for index in range(count)
            for name, scale in zip(scaled, spec.scales or (), strict=False)
            for kind in ("weight", "bias")
        }
        within = [names.in_layer(index, part) for index in range(count) for part in names.qkv]
        self._into_heads = {f"{name}.{kind}" for name in within for kind in ("weight", "bias")}
        self._out_of_heads = {
            f"{names.in_layer(index, names.output)}.weight" for index in range(count)
        }
        self._widened: set[str] = set()
        if self._width != self._hidden_size // self._heads:
            self._widened = self._into_heads | self._out_of_heads
        self._changed = self._widened | self._turning | self._scales.keys()
        self._norm = f"{names.in_layer(0, names.mixer_norm)}.weight"

    @property
    def stored(self) -> Iterable[str]:
        """Names of its tensors in the checkpoint."""
        return self._stored.values()

    def tensor_names(self) -> list[str]:
        return [*self._made, *self._stored]

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._made:
            return self._made[name].shape
        shape = self._weights.shape(self._stored[name])
        if name in self._head_norms:
            return (self._width,)
        wide = self._heads * self._width
        if name in self._into_heads:
            parts = max(1, shape[0] // self._hidden_size)
            return (parts * wide, *shape[1:])
        return (shape[0], wide) if name in self._out_of_heads else shape

    def packed_bits(self, name: str) -> int | None:
        return self._of(name, self._weights.packed_bits)

    def group_size(self, name: str) -> int | None:
        return self._of(name, self._weights.group_size)

    def float_bits(self, name: str) -> int | None:
        return self._of(name, self._weights.float_bits)

    def _of(self, name: str, asked: Any) -> int | None:
        if name in self._changed or name not in self._stored:
            return None
        found: int | None = asked(self._stored[name])
        return found

    def load(self, name: str) -> Any:
        if name in self._made:
            norm = self._weights.load(self._stored[self._norm])
            return arrays.like(norm, self._made[name])
        weight = self._weights.load(self._stored[name])
        if name in self._changed and not arrays.is_array(weight):
            weight = dense(weight, "float32")
        if name in self._scales:
            scale = dense(self.load(self._scales[name]), "float32")
            weight = dense(weight, "float32") * scale.reshape(-1, *(1,) * (len(weight.shape) - 1))
        if name in self._head_norms:
            return self._head_norm(weight)
        if name in self._turning:
            weight = self._turned(weight)
        if name in self._widened:
            into = name in self._into_heads
            return self._widened_rows(weight) if into else self._widened_columns(weight)
        return weight

    def _turned(self, weight: Any) -> Any:
        """Order rows of heads as `RopeSpec` pairs them: by rows of a picture, then by columns."""
        quarter = self._hidden_size // self._heads // 4
        halves = weight.reshape(-1, 2, 2, quarter, *weight.shape[1:]).swapaxes(1, 2)
        return arrays.cat([halves[:, :, 1:], halves[:, :, :1]], dim=2).reshape(weight.shape)

    def _head_norm(self, weight: Any) -> Any:
        """Widen a norm of heads; the mean square is then of the wider ones."""
        weight = dense(weight, "float32")
        narrow = len(weight)
        if self._turns_by_halves:
            weight = self._turned(weight)
        return arrays.padded(weight * (narrow / self._width) ** 0.5, self._width - narrow)

    def _widened_rows(self, weight: Any) -> Any:
        parts = weight.shape[0] // self._hidden_size
        narrow = self._hidden_size // self._heads
        turned = weight.reshape(parts * self._heads, narrow, -1).swapaxes(1, 2)
        wide = arrays.padded(turned, self._width - narrow).swapaxes(1, 2)
        return wide.reshape(-1, *weight.shape[1:])

    def _widened_columns(self, weight: Any) -> Any:
        narrow = self._hidden_size // self._heads
        if self.value_scale != 1.0:
            weight = dense(weight, "float32") / self.value_scale
        parts = weight.reshape(weight.shape[0], self._heads, narrow)
        return arrays.padded(parts, self._width - narrow).reshape(weight.shape[0], -1)

    def stored_name(self, name: str) -> str:
        """Return a tensor's name in the checkpoint."""
        return self._stored[name]

    def as_stored(self, name: str) -> Any:
        """Read a tensor of the checkpoint without what executors need of it."""
        return self._weights.load(self._stored[name])

    def notes(self) -> tuple[str, ...]:
        return self._weights.notes()


def _stored_names(family: TowerFamily, spec: TowerSpec, present: list[str]) -> dict[str, str]:
    """Return the stored names of a tower's tensors by the family's; none if they are not here."""
    first = f"{spec.patch.name}.weight".removeprefix(TOWER)
    stored = set(present)
    for tower, projector in family.places:
        if f"{tower}{first}" not in stored:
            continue
        found = {
            TOWER + name.removeprefix(tower): name for name in present if name.startswith(tower)
        }
        if projector:
            found |= {
                PROJECTOR + name.removeprefix(projector): name
                for name in present
                if name.startswith(projector)
            }
        return found
    return {}
