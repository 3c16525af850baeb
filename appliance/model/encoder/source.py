"""Opens an encoder's folder or GGUF file and checks it before its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from appliance.checkpoint import CONFIG_NAME, SafetensorsFolder
from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.files import read_json
from appliance.gguf import GGUFFile, starts_as_gguf
from appliance.gguf_names import is_gguf
from appliance.model.checked import check_finite
from appliance.model.encoder.families import find_encoder, read_encoder
from appliance.model.encoder.from_decoder import gguf_only_reads, open_decoder
from appliance.model.encoder.gguf_families import (
    GGUF_ENCODERS,
    GGUFTensors,
    read_gguf_encoder,
)
from appliance.model.encoder.spec import encoder_slots
from appliance.model.families.registry import only_reads

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.kernels.weight import Weight
    from appliance.model.encoder.spec import EncoderNames, EncoderSpec
    from appliance.model.source import ModelSource

# Of LayerNorm in checkpoints that were made by TensorFlow.
_OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


@dataclass(frozen=True, slots=True)
class EncoderSource:
    """A checked encoder whose tensors can be read one by one.

    Attributes:
        prefix: of the names of the encoder's own tensors.
    """

    path: Path
    spec: EncoderSpec
    names: EncoderNames
    prefix: str
    tensors: SafetensorsFolder | GGUFTensors

    def num_parameters(self) -> int:
        """Count the weights that the encoder reads, packed or not."""
        return sum(map(prod, encoder_slots(self.spec, self.names, self.prefix).values()))

    def load(self, name: str) -> Weight:
        """Read one tensor, packed or as a `HostArray`.

        Raises:
            CheckpointError: it holds NaN or infinity.
        """
        stored = _stored_name(self.tensors, name)
        weight = self.tensors.load(stored)
        check_finite(weight, self.path, stored)
        return weight

    def bytes_per_weight(self, name: str) -> float | None:
        """Return what a matrix takes as kernels hold it; None if it is dense."""
        if isinstance(self.tensors, GGUFTensors):
            return self.tensors.bytes_per_weight(name)
        return None


def is_encoder(path: Path) -> bool:
    """Return True if a folder's config, or a GGUF file's metadata, is of an encoder."""
    file = path / CONFIG_NAME
    if path.is_dir():
        return file.is_file() and find_encoder(read_json(file)) is not None
    return _metadata(path).get("general.architecture") in GGUF_ENCODERS


def _metadata(path: Path) -> dict[str, Any]:
    is_one = path.is_file() and (is_gguf(path) or starts_as_gguf(path))
    return GGUFFile(path, in_torch=False, vocabulary=False).metadata if is_one else {}


def reads_only(path: Path) -> bool:
    """Return True if a model reads texts and writes none: an encoder, or a decoder as one."""
    if is_encoder(path):
        return True
    file = path / CONFIG_NAME
    if path.is_dir():
        return file.is_file() and only_reads(read_json(file))
    return gguf_only_reads(_metadata(path))


def open_reader(path: Path) -> EncoderSource | ModelSource:
    """Open a model that only reads: an encoder, or a decoder as one.

    Raises:
        CheckpointError: a part is missing, cut or of the wrong shape; names the first.
        UnsupportedModelError: a setting that no code here covers.
    """
    return open_encoder(path) if is_encoder(path) else open_decoder(path)


def open_encoder(path: Path) -> EncoderSource:
    """Open the folder or the GGUF file of an encoder.

    Raises:
        CheckpointError: a part is missing, cut or of the wrong shape; names the first.
        UnsupportedModelError: a setting that no code here covers.
    """
    return _open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_folder(path: Path) -> EncoderSource:
    folder = SafetensorsFolder(path, in_torch=False)
    family = find_encoder(folder.config)
    assert family is not None, "ask is_encoder first"
    spec = read_encoder(family, folder.config, str(path / CONFIG_NAME))
    stored = set(folder.tensor_names())
    names = family.names
    if (other := family.other_names) is not None:
        first = other.layer.format(0)
        names = (
            other
            if any(f"{p}{first}.{other.up[0]}.weight" in stored for p in other.prefixes)
            else names
        )
    prefix = next(
        (one for one in names.prefixes if f"{one}{names.tokens}.weight" in stored),
        names.prefixes[0],
    )
    if not any(_stored_name(folder, name) in stored for name in encoder_slots(spec, names, prefix)):
        known = ", ".join(f"{one}{names.tokens}.weight" for one in names.prefixes)
        raise UnsupportedModelError(
            f"{path.name}: {CONFIG_NAME} describes a {family.model_type} encoder, and none of its "
            f"tensors is here by a name that is known: looked for {known}; the first of the "
            f"{len(stored)} stored are {', '.join(sorted(stored)[:3])}. If they are the encoder's, "
            "load the folder with transformers and save it again, which writes known names"
        )
    source = EncoderSource(path, spec, names, prefix, folder)
    _check_tensors(source, CONFIG_NAME, "take config.json and weights of one revision")
    return source


def _open_gguf(path: Path) -> EncoderSource:
    file = GGUFFile(path, in_torch=False, vocabulary=False)
    spec, names = read_gguf_encoder(file)
    source = EncoderSource(file.path, spec, names, "", GGUFTensors(file))
    _check_tensors(source, "its metadata", "use another file of the model")
    return source


def _check_tensors(source: EncoderSource, settings: str, advice: str) -> None:
    """Raise CheckpointError for a tensor that is missing, of another shape or without a place."""
    spec, tensors, name_of = source.spec, source.tensors, source.path.name
    left = set(tensors.tensor_names())
    for name, shape in encoder_slots(spec, source.names, source.prefix).items():
        stored = _stored_name(tensors, name)
        if stored not in left:
            raise CheckpointError(f"{name_of}: tensor {name} is missing; {advice}")
        if tuple(tensors.shape(stored)) != shape:
            raise CheckpointError(
                f"{name_of}: tensor {stored} has shape {tuple(tensors.shape(stored))}, but "
                f"{settings} asks for {shape}; {advice}"
            )
        left.discard(stored)
    for name in sorted(left):
        if not name.startswith(source.names.unused):
            raise CheckpointError(
                f"{name_of}: tensor {name} has no place in a {spec.architecture} model of "
                f"{len(spec.layers)} layers; its settings ({settings}) belong to another model"
            )


def _stored_name(tensors: SafetensorsFolder | GGUFTensors, name: str) -> str:
    known = tensors.tensor_names()
    for new, old in _OLD_NAMES.items():
        if name.endswith(new) and name not in known:
            return name.removesuffix(new) + old
    return name
