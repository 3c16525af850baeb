"""Writes the projector file (`mmproj`) of a vision tower, proved by reading it back.

Settings are those of llama.cpp's converter (conversion/base.py); the way back is
`model.vision.mmproj`.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.errors import ApplianceError, QuantizeError
from appliance.kernels.activation import Activation
from appliance.kernels.weights.weight import dense
from appliance.media.mmproj import image_processor_of_mmproj, metadata_of
from appliance.media.processor_config import read_image_processor
from appliance.model.row_orders import halves_from_pairs
from appliance.model.source import open_model
from appliance.model.spec import AttentionSpec, MLPSpec
from appliance.model.tensors import Role, TensorSlot, tensor_slots
from appliance.model.vision.families.family import CLIP, made_names
from appliance.model.vision.families.registry import tower_family
from appliance.model.vision.mmproj import names_of_numbers, names_outside, stored_layers
from appliance.model.vision.source import open_projector, open_tower
from appliance.model.vision.spec import PositionTable
from appliance.model_files.checkpoint import read_config
from appliance.model_files.files_beside import find_projector
from appliance.quant.formats.ggml_blocks import row_bytes
from appliance.quant.gguf.file_writer import (
    PLAIN_TYPES,
    GGUFFileWriter,
    PlannedFile,
    TypedTensor,
)
from appliance.quant.gguf.from_checkpoint import unlike
from appliance.quant.gguf.tensors import FileSetting, FileSettings, FileTensor
from appliance.quant.run.shard_writer import TensorLayout
from gguf import GGMLQuantizationType, quants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.model.source import ModelSource
    from appliance.model.vision.families.family import ClipMapping, TowerFamily
    from appliance.model.vision.source import TowerSource
    from appliance.model.vision.spec import TowerSpec

_ANY_SIDE, _AXES_SIDE = 560, 224  # of towers that take pictures of any: files must say one
_ACTIVATIONS = {
    Activation.SILU: "clip.use_silu",
    Activation.GELU: "clip.use_gelu",
    Activation.GELU_TANH: "clip.use_gelu",
}
_EIGHT_BITS, _BLOCK = "Q8_0", 32


@dataclass(frozen=True, slots=True)
class ProjectorTensor:
    """A tensor of the file.

    Attributes:
        name: the file's.
        values: reads it.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    values: Callable[[], Tensor]

    @property
    def planned(self) -> TypedTensor:
        layout = TensorLayout(self.name, torch.uint8, self.shape)
        if self.type_name == _EIGHT_BITS:
            rows, inputs = self.shape
            layout = replace(layout, shape=(rows, row_bytes(_EIGHT_BITS, inputs)))
        else:
            layout = replace(layout, dtype=PLAIN_TYPES[self.type_name])
        slot = TensorSlot(self.name, self.shape, Role.OTHER_PART)
        return TypedTensor(FileTensor(slot, self.name, None, 0.0), self.type_name, layout)

    def stored(self) -> Tensor:
        """Return it as the file has it."""
        values = self.values()
        if self.type_name != _EIGHT_BITS:
            return values.reshape(self.shape).to(PLAIN_TYPES[self.type_name])
        blocks = quants.quantize(values.float().numpy(), GGMLQuantizationType.Q8_0)
        return torch.from_numpy(blocks)


@dataclass(frozen=True, slots=True)
class PlannedProjector:
    """A projector file before its weights.

    Attributes:
        spec: of the tower.
        notes: for the user.
    """

    spec: TowerSpec
    file: PlannedFile
    tensors: tuple[ProjectorTensor, ...]
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.file.nbytes

    def write(self, model: Path) -> None:
        """Write the file beside a GGUF model, by whose name it is found."""
        with GGUFFileWriter(_beside(model), self.file) as file:
            for tensor in self.tensors:
                file.write(tensor.name, [tensor.stored()])


@dataclass(frozen=True, slots=True)
class CopiedProjector:
    """The projector file of a GGUF model that is made into another one."""

    path: Path

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"{self.path.name} is copied, for pictures",)

    @property
    def nbytes(self) -> int:
        return self.path.stat().st_size

    def write(self, model: Path) -> None:
        """Copy the file beside a GGUF model, by whose name it is found."""
        shutil.copyfile(self.path, _beside(model))


def _beside(model: Path) -> Path:
    return model.with_name(f"mmproj-{model.name}")


Projector = PlannedProjector | CopiedProjector


def projector_of(
    source: ModelSource, text: PlannedFile, bits: int = 16
) -> tuple[Projector | None, tuple[str, ...]]:
    """Return the projector file of a model that becomes a GGUF file, and notes for the user.

    Without one, where a tower has no such file, the result reads texts alone.

    Args:
        text: the planned file of the model's text.
        bits: of the tower's matrices, 16 or 8.

    Raises:
        QuantizeError: 8 bits are asked where no tower is written.
    """
    planned: Projector | None = None
    notes: tuple[str, ...] = ()
    if source.path.is_file():
        path = find_projector(source.path)
        planned = None if path is None else CopiedProjector(path)
    else:
        try:
            if (planned := plan_projector(source, bits)) is not None:
                _check_as_read(planned, text)
        except ApplianceError as error:
            planned = None
            notes = (f"the result reads texts alone: {error}",)
    if bits != 16 and not isinstance(planned, PlannedProjector):
        why = notes[0] if notes else "it has no vision tower"
        raise QuantizeError(f"--tower {bits}: {source.path.name}: {why}; leave it out")
    return planned, notes if planned is None else (*notes, *planned.notes)


def plan_projector(source: ModelSource, bits: int = 16) -> PlannedProjector | None:
    """Plan the projector file of a folder; None if its family's models have no tower.

    Args:
        bits: of the tower's matrices, 16 or 8.

    Raises:
        QuantizeError: there is no such file of the family, or no image processor.
        ModelError: as `open_tower` and `read_image_processor`.
    """
    config = read_config(source.path)
    family = tower_family(config)
    if family is None:
        return None
    if family.clip is None:
        raise QuantizeError(f"projector files of {config['model_type']} are not known here")
    tower = open_tower(source.path)
    assert tower is not None, "its family has one"
    if not tower.spec.layers.layers:
        raise QuantizeError(f"projector files of {config['model_type']} are read, not written")
    processor = read_image_processor(source.path)
    if processor is None:
        raise QuantizeError("no preprocessor_config.json says how pictures are read")
    clip = family.clip
    tensors = tuple(_tensors(tower, family, clip, bits))
    settings = _settings(tower.spec, clip, source.spec.hidden_size)
    settings |= {f"{CLIP}{key}": value for key, value in metadata_of(processor).items()}
    described = FileSettings("clip", tuple(map(FileSetting.of, settings, settings.values())))
    file = PlannedFile.of(described, [one.planned for one in tensors])
    reads = image_processor_of_mmproj(settings)
    differing = next(unlike("the image processor", processor, reads), None)
    note = f"a projector file cannot say all of how pictures are read: {differing}"
    return PlannedProjector(tower.spec, file, tensors, () if differing is None else (note,))


def _settings(spec: TowerSpec, clip: ClipMapping, text_width: int) -> dict[str, Any]:
    layer = spec.layers.layers[0]
    assert isinstance(layer.mixer, AttentionSpec)
    assert isinstance(layer.mlp, MLPSpec)
    assert isinstance(layer.mlp.activation, Activation)
    side = _ANY_SIDE if spec.table is None else _AXES_SIDE
    if isinstance(spec.table, PositionTable):
        side = spec.table.side * spec.patch.size
    found: dict[str, Any] = {
        "projection_dim": text_width,
        "image_size": side,
        "patch_size": spec.patch.size,
        "embedding_length": spec.layers.hidden_size,
        "feed_forward_length": layer.mlp.intermediate_size,
        "block_count": len(spec.layers.layers),
        "attention.head_count": layer.mixer.num_heads,
        "attention.layer_norm_epsilon": layer.norm.eps,
        clip.merge: spec.merge,
    }
    if clip.tapped:
        taps = {layer for layer, _ in spec.taps}
        found["is_deepstack_layers"] = [i in taps for i in range(len(spec.layers.layers))]
    if spec.windows is not None:
        found["n_wa_pattern"] = spec.windows.whole[0] + 1
        found["window_size"] = spec.windows.cells * spec.merge * spec.patch.size
    use = _ACTIVATIONS.get(layer.mlp.activation)
    return {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": clip.projector,
        **({} if use is None else {use: True}),
        **{f"{CLIP}{key}": value for key, value in found.items()},
    }


def _tensors(
    tower: TowerSource, family: TowerFamily, clip: ClipMapping, bits: int
) -> Iterator[ProjectorTensor]:
    """List the file's tensors."""
    spec, weights = tower.spec, tower.weights
    present = {*weights.tensor_names()}
    layers, own = stored_layers(spec), clip.own_names or family.names
    made = made_names(own, spec)
    pairs = zip(tensor_slots(layers, own), tensor_slots(layers, clip.names), strict=True)
    for slot, named in pairs:
        if slot.name not in made:
            yield _tensor(named.name, _reader(tower, family, clip, slot), bits)
    for name, stored in names_of_numbers(spec, own, clip).items():
        yield _tensor(stored, partial(weights.as_stored, name), bits)
    for name, stored in names_outside(spec, clip).items():
        for end in ("", ".weight", ".bias"):
            if f"{name}{end}" not in present:
                continue
            if name == spec.patch.name and end == ".weight":
                yield from _patches(tower, f"{stored}{end}", bits)
                continue
            read = partial(weights.as_stored, f"{name}{end}")
            norm = spec.projector.norm
            if norm is not None and name == spec.projector.norm_name and end == ".weight":
                read = partial(_shifted, read, norm.offset)
            yield _tensor(f"{stored}{end}", read, bits)


def _reader(
    tower: TowerSource, family: TowerFamily, clip: ClipMapping, slot: TensorSlot
) -> Callable[[], Tensor]:
    """Return what reads a tensor of a layer, or its rows of one that the folder has joined."""
    weights, names = tower.weights, family.names
    parts = (Role.QUERY, Role.KEY, Role.VALUE)
    if clip.own_names is not None and slot.role in parts:
        assert slot.layer is not None
        joined = names.in_layer(slot.layer, names.qkv[0]) + slot.name[slot.name.rindex(".") :]
        return partial(_third, partial(weights.as_stored, joined), parts.index(slot.role))
    read = partial(weights.as_stored, slot.name)
    if clip.interleaved_rope and slot.role in parts[:2]:
        mixer = tower.spec.layers.layers[0].mixer
        assert isinstance(mixer, AttentionSpec)
        width = slot.shape[0] // mixer.num_heads
        return partial(_ordered, read, halves_from_pairs(slot.shape[0], width).argsort())
    return read


def _third(read: Callable[[], Tensor], index: int) -> Tensor:
    return read().chunk(3)[index]


def _ordered(read: Callable[[], Tensor], order: NDArray[np.int64]) -> Tensor:
    return read()[torch.from_numpy(order)]


def _shifted(read: Callable[[], Tensor], offset: float) -> Tensor:
    return read().float() + offset


def _patches(tower: TowerSource, stored: str, bits: int) -> Iterator[ProjectorTensor]:
    """List the linear of patches, one tensor for each frame."""
    patch = tower.spec.patch
    for frame in range(patch.frames):
        name = stored if frame == 0 else f"{stored}.{frame}"
        yield _tensor(name, partial(_patch, tower, frame), bits)


def _patch(tower: TowerSource, frame: int) -> Tensor:
    """Read the weights of a frame's pixels, (hidden_size, 3, size, size)."""
    patch = tower.spec.patch
    weight: Tensor = tower.weights.as_stored(f"{patch.name}.weight")
    if patch.frames > 1:
        return weight[:, :, frame]
    if patch.channels_last:
        return weight.view(len(weight), patch.size, patch.size, 3).permute(0, 3, 1, 2)
    return weight


def _tensor(name: str, read: Callable[[], Any], bits: int) -> ProjectorTensor:
    values = read()
    if not isinstance(values, torch.Tensor):
        read = partial(_unpacked, read)
        values = read()
    shape = tuple(values.shape) or (1,)
    return ProjectorTensor(name, shape, _type_name(name, shape, values.dtype, bits), read)


def _unpacked(read: Callable[[], Any]) -> Tensor:
    values: Tensor = dense(read(), "float32")
    return values


def _type_name(name: str, shape: tuple[int, ...], dtype: torch.dtype, bits: int) -> str:
    """Choose a type as llama.cpp's converter does: vectors, positions and patches are exact."""
    is_matrix = sum(size > 1 for size in shape) > 1
    if not is_matrix or "position" in name or "patch_embd" in name:
        return "F32"
    fills = len(shape) == 2 and shape[1] % _BLOCK == 0 and "input_projection" not in name
    if bits == 8 and fills:
        return _EIGHT_BITS
    return "BF16" if dtype is torch.bfloat16 else "F16"


def _check_as_read(planned: PlannedProjector, text: PlannedFile) -> None:
    """Read the settings back from files without weights.

    Raises:
        QuantizeError: they would be another tower's; the message names what differs.
    """
    with tempfile.TemporaryDirectory(prefix="appliance-") as folder:
        path, beside = Path(folder, "mmproj.gguf"), Path(folder, "text.gguf")
        planned.file.write_without_weights(path)
        text.write_without_weights(beside)
        try:
            read = open_projector(path, open_model(beside)).spec
        except ApplianceError as error:
            raise QuantizeError(str(error).replace(f"{folder}/", "")) from error
    for what in unlike("the tower", planned.spec, read):
        raise QuantizeError(f"a projector file cannot say a setting of it: {what}")
