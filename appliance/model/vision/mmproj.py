"""Opens the tower of a GGUF projector file (`mmproj`) for the text of a GGUF model.

Its tensors are presented under the names, in the order and with the offsets of folders, so that
nothing else knows the difference. Layout: llama.cpp's conversion/ and tools/mtmd/clip.cpp.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError
from appliance.gguf import GGUFFile
from appliance.kernels import arrays
from appliance.kernels.weights.weight import dense
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.gguf_weights import GGUFWeights
from appliance.model.spec import AttentionSpec, MLPSpec
from appliance.model.tensors import tensor_slots
from appliance.model.vision.families.family import CLIP, ClipSettings, made_names
from appliance.model.vision.families.registry import family_of_projector
from appliance.model.vision.spec import AxisTables

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.model.families.reader import ConfigReader
    from appliance.model.names import TensorNames
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec, NormSpec
    from appliance.model.tensors import TensorSlot
    from appliance.model.vision.families.family import ClipMapping, TowerFamily
    from appliance.model.vision.spec import TowerSpec

_AGAIN = "fetch the projector file again, or convert it with a newer llama.cpp"
# Tensors that change no row of a picture: those of sound, and the embedding of a control word.
_UNUSED = re.compile(r"a\..*|mm\.a\..*|v\.token_embd\.img_break|v\.blk\.(?P<layer>\d+)\..*")


def read_projector(
    path: Path, text: ModelSource, *, in_torch: bool
) -> tuple[TowerFamily, TowerSpec, MmprojWeights]:
    """Read a projector file's description, and find its tensors.

    Args:
        text: the GGUF model that its rows are for.

    Raises:
        CheckpointError: a setting or tensor is missing or of another shape, or the file is of
            another model.
        UnsupportedModelError: its type or a setting is not supported.
    """
    file = GGUFFile(path, in_torch=in_torch)
    family, clip, kind = _family_for(file, text)
    if clip.own_names is not None:
        family = replace(family, names=clip.own_names)
    settings = clip.settings(ClipSettings(file))
    spec = family.spec(settings | {"model_type": kind, "text_config": text.config}, str(path))
    weights = MmprojWeights(file, family, clip, spec)
    last = spec.projector.linears[-1]
    transposed = last.stored_transposed
    width = weights.shape(last.name if transposed else f"{last.name}.weight")[int(transposed)]
    if width != text.spec.hidden_size or bool(spec.taps) != (kind in clip.tapped):
        at = f", and adds to {len(spec.taps)} layers" if spec.taps else ""
        raise CheckpointError(
            f"{path.name} is of another model than {text.path.name}: it makes rows of width"
            f" {width:,}{at}, and the model's are {text.spec.hidden_size:,} wide; {_give(text)}"
        )
    return family, spec, weights


def _give(text: ModelSource) -> str:
    return (
        f"give the projector file that was published with {text.path.name} with --mmproj, or"
        " --no-images for texts alone"
    )


def _family_for(file: GGUFFile, text: ModelSource) -> tuple[TowerFamily, ClipMapping, str]:
    """Find a file's family and the `model_type` of the whole that it makes with a text."""
    name, metadata = file.path.name, file.metadata
    if metadata.get("general.architecture") != "clip":
        raise CheckpointError(
            f"{name} is no projector file: its general.architecture is"
            f" {str(metadata.get('general.architecture'))[:40]!r}, not 'clip'; {_give(text)}"
        )
    projector = metadata.get(f"{CLIP}projector_type") or metadata.get("clip.projector_type")
    family, clip = family_of_projector(projector)
    mapping = text.family.gguf
    kind = None if mapping is None else clip.wholes.get(mapping.architecture)
    if kind is None:
        own = text.spec.architecture if mapping is None else mapping.architecture
        raise CheckpointError(
            f"{name} is of another model than {text.path.name}: its type {projector} belongs to"
            f" {', '.join(clip.wholes)}, and the model is {own}; {_give(text)}"
        )
    return family, clip, kind


class MmprojWeights:
    """A `WeightReader` of a projector file's tensors, by the names of its family.

    Raises:
        CheckpointError: a tensor is missing, of another shape or unknown.
    """

    def __init__(
        self, file: GGUFFile, family: TowerFamily, clip: ClipMapping, spec: TowerSpec
    ) -> None:
        self._file, self._spec = file, spec
        stored = stored_layers(spec)
        names = _names_in(file, clip.names, stored)
        mapping = GGUFMapping("clip", _no_settings, names, clip.interleaved_rope)
        described = Family(
            family.name, family.name, (), described_elsewhere, names=family.names, gguf=mapping
        )
        self._layers = GGUFWeights(file, described, stored)
        self._outside = self._find_outside(clip)
        inside = names_of_numbers(spec, family.names, replace(clip, names=names))
        if missing := sorted({*inside.values()} - {*file.tensor_names()}):
            raise CheckpointError(f"{file.path.name}: tensor {missing[0]} is missing; {_AGAIN}")
        self._outside |= inside
        made = made_names(family.names, spec)
        slots = [one for one in tensor_slots(stored, family.names) if one.name not in made]
        self._inside = {slot.name for slot in slots}
        self._check(slots)
        norm = spec.projector.norm
        self._shifted = {f"{spec.projector.norm_name}.weight": 0.0 if norm is None else norm.offset}

    def _find_outside(self, clip: ClipMapping) -> dict[str, str]:
        """Return the stored names of tensors around the layers by the family's."""
        names = names_outside(self._spec, clip)
        present = self._file.tensor_names()
        found = {own: stored for own, stored in names.items() if stored in present}
        for kind in ("weight", "bias"):
            pairs = ((f"{own}.{kind}", f"{stored}.{kind}") for own, stored in names.items())
            found |= {own: stored for own, stored in pairs if stored in present}
        wanted = _needed(self._spec)
        if missing := [own for own in wanted if own not in found]:
            own, _, kind = missing[0].rpartition(".")
            stored = f"{names[own]}.{kind}" if own in names else names[missing[0]]
            raise CheckpointError(f"{self._file.path.name}: tensor {stored} is missing; {_AGAIN}")
        return found

    def _check(self, slots: list[TensorSlot]) -> None:
        name, present = self._file.path.name, set(self._layers.tensor_names())
        for slot in slots:
            usual = self._layers.usual_name(slot.name)
            if slot.name not in present:
                raise CheckpointError(f"{name}: tensor {usual} is missing; {_AGAIN}")
            if (shape := tuple(self._layers.shape(slot.name))) != slot.shape:
                raise CheckpointError(
                    f"{name}: tensor {usual} has shape {shape}, and its settings say {slot.shape};"
                    f" {_AGAIN}"
                )
        known = {self._layers.usual_name(one) for one in self._inside}
        known |= set(self._outside.values())
        known |= {f"{stored}.1" for stored in self._outside.values()}
        count = len(self._spec.layers.layers)
        for stored in sorted(set(self._file.tensor_names()) - known):
            found = _UNUSED.fullmatch(stored)
            if found is None or (found["layer"] and int(found["layer"]) < count):
                raise CheckpointError(
                    f"{name}: tensor {stored} has no place in a tower of {count} layers, and"
                    f" pictures would be read wrongly without it; {_AGAIN}"
                )

    def tensor_names(self) -> list[str]:
        return [*self._inside, *self._outside]

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._inside:
            return self._layers.shape(name)
        return self._file.shape(self._outside[name])

    def packed_bits(self, name: str) -> int | None:
        return self._layers.packed_bits(name) if name in self._inside else None

    def group_size(self, name: str) -> int | None:
        return self._layers.group_size(name) if name in self._inside else None

    def float_bits(self, name: str) -> int | None:
        return self._layers.float_bits(name) if name in self._inside else None

    def load(self, name: str) -> Any:
        if name in self._inside:
            return self._layers.load(name)
        stored = self._outside[name]
        weight: Any = self._file.load(stored)
        if offset := self._shifted.get(name, 0.0):
            return dense(weight, "float32") - offset
        patch, table = self._spec.patch, self._spec.table
        if isinstance(table, AxisTables) and table.axes_second and name == table.name:
            return weight.swapaxes(0, 1)
        if name in _of_norm(patch.norm, patch.norm_name):
            return self._channels_last(weight.reshape(1, -1)).reshape(-1)
        if name != f"{patch.name}.weight":
            return weight
        if patch.frames > 1:
            others = (f"{stored}.{frame}" for frame in range(1, patch.frames))
            return arrays.stack([weight, *map(self._file.load, others)], 2)
        return self._channels_last(weight) if patch.channels_last else weight

    def _channels_last(self, weight: Any) -> Any:
        """Order the inputs of a patch as folders have them: (outputs, size, size, 3)."""
        size = self._spec.patch.size
        return weight.reshape(len(weight), 3, size, size).swapaxes(1, 2).swapaxes(2, 3)

    def notes(self) -> tuple[str, ...]:
        return ()


def names_outside(spec: TowerSpec, clip: ClipMapping) -> dict[str, str]:
    """Return the stored names of what is around the layers by the family's: see `ClipMapping`."""
    names: dict[str, str] = {}
    for own, stored in clip.outside.items():
        if "{}" not in own:
            names[own] = stored
            continue
        for place, (layer, _) in enumerate(spec.taps):
            names[own.format(place)] = stored.format(layer)
    return names


def names_of_numbers(spec: TowerSpec, names: TensorNames, clip: ClipMapping) -> dict[str, str]:
    """Return the stored names of vectors that multiply what attention and MLP say, and of bounds.

    Bounds are those that linears of the layers clip to; see `clipping`.
    """
    found: dict[str, str] = {}
    for index in range(len(spec.layers.layers)):
        for own, stored in zip(spec.scales or (), clip.scales or (), strict=True):
            found[names.in_layer(index, own)] = clip.names.in_layer(index, stored)
        pairs = zip(_linears(names), _linears(clip.names), strict=True) if spec.clips else ()
        for own, stored in pairs:
            linear = names.in_layer(index, own).rpartition(".")[0]
            for end in ("input_min", "input_max", "output_min", "output_max"):
                found[f"{linear}.{end}"] = f"{clip.names.in_layer(index, stored)}.{end}"
    return found


def _linears(names: TensorNames) -> tuple[str, ...]:
    return (*names.qkv, names.output, *names.gate_up, names.down)


def _names_in(file: GGUFFile, names: TensorNames, layers: DecoderSpec) -> TensorNames:
    """Return the names of the layers' tensors; early files call up what is down."""
    if not layers.layers:
        return names
    down = f"{names.in_layer(0, names.down)}.weight"
    mlp = layers.layers[0].mlp
    assert isinstance(mlp, MLPSpec)
    is_square = mlp.intermediate_size == layers.hidden_size
    if is_square or down not in file.tensor_names():
        return names
    if file.shape(down) != (mlp.intermediate_size, layers.hidden_size):
        return names
    *gate, up = names.gate_up
    return replace(names, gate_up=(*gate, names.down), down=up)


def _no_settings(file: GGUFFile) -> dict[str, Any]:
    raise AssertionError("a tower's settings are read by its own family")


def described_elsewhere(config: ConfigReader) -> DecoderSpec:
    """Stand for a family's reader where a tower's own family describes the layers."""
    raise AssertionError("a tower's layers are described by its own family")


def stored_layers(spec: TowerSpec) -> DecoderSpec:
    """Return the layers with heads as wide as they are stored."""
    if not spec.layers.layers:
        return spec.layers
    layer = spec.layers.layers[0]
    mixer = layer.mixer
    assert isinstance(mixer, AttentionSpec)
    mixer = replace(mixer, head_dim=spec.layers.hidden_size // mixer.num_heads)
    return replace(spec.layers, layers=(replace(layer, mixer=mixer),) * len(spec.layers.layers))


def _needed(spec: TowerSpec) -> list[str]:
    """List the tensors that a tower reads around its layers."""
    found = [f"{spec.patch.name}.weight"] + [f"{spec.patch.name}.bias"] * spec.patch.bias
    found += [] if spec.table is None else [spec.table.name]
    found += [spec.first_row] if spec.first_row else []
    found += _of_norm(spec.patch.norm, spec.patch.norm_name)
    found += _of_norm(spec.first_norm, spec.first_norm_name)
    found += _of_norm(spec.sum_norm, spec.sum_norm_name)
    for projector in (spec.projector, *(one for _, one in spec.taps)):
        found += [f"{projector.standard}{kind}" for kind in ("bias", "scale") if projector.standard]
        found += _of_norm(projector.norm, projector.norm_name)
        for linear in projector.linears:
            found.append(linear.name if linear.stored_transposed else f"{linear.name}.weight")
            found += [f"{linear.name}.bias"] * linear.bias
    return found


def _of_norm(norm: NormSpec | None, name: str) -> list[str]:
    if norm is None:
        return []
    return [f"{name}.weight"] * norm.weight + [f"{name}.bias"] * (norm.centered and norm.bias)
