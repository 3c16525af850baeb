"""Opens a model of any kind as the engine does, and checks it before its weights are loaded.

What encoders are is read here; other models are opened by the files that describe them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.files import read_json
from appliance.gguf import GGUFFile, starts_as_gguf
from appliance.model.encoder.families import find_encoder, read_encoder
from appliance.model.encoder.from_decoder import gguf_only_reads, open_decoder
from appliance.model.encoder.gguf_families import (
    GGUF_ENCODERS,
    GGUFTensors,
    read_gguf_encoder,
)
from appliance.model.encoder.spec import encoder_slots
from appliance.model.families.registry import only_reads
from appliance.model.leftovers import leftover_notes, leftovers
from appliance.model.source import open_unchecked, read_settings, tensor_problems
from appliance.model.tensor_reader import check_finite
from appliance.model_files.checkpoint import CONFIG_NAME, SafetensorsFolder, read_config
from appliance.model_files.gguf_names import is_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from appliance.kernels.weights.weight import Weight
    from appliance.model.encoder.spec import EncoderNames, EncoderSpec
    from appliance.model.families.reader import ConfigReader
    from appliance.model.source import ModelSettings, ModelSource

# Of LayerNorm in checkpoints that were made by TensorFlow.
_OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


class EncoderSettings(NamedTuple):
    """The settings of an encoder's folder, read, and what they describe."""

    reader: ConfigReader
    spec: EncoderSpec


@dataclass(frozen=True, slots=True)
class EncoderSource:
    """A checked encoder whose tensors can be read one by one.

    Attributes:
        prefix: of the names of the encoder's own tensors.
        reader: of config.json, and what it read; None for a GGUF file.
    """

    path: Path
    spec: EncoderSpec
    names: EncoderNames
    prefix: str
    tensors: SafetensorsFolder | GGUFTensors
    reader: ConfigReader | None = None

    @property
    def only_reads(self) -> bool:
        return True

    def slots(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that the encoder reads, by its name."""
        return encoder_slots(self.spec, self.names, self.prefix)

    def num_parameters(self) -> int:
        """Count the weights that the encoder reads, packed or not."""
        return sum(map(prod, self.slots().values()))

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


def reads_only(path: Path, settings: Mapping[str, Any] | None = None) -> bool:
    """Return True if a model reads texts and writes none: an encoder, or a decoder as one.

    Args:
        settings: replace config.json's, or a GGUF file's metadata.
    """
    if settings is None:
        settings = _settings(path)
    if _is_encoder(path, settings):
        return True
    return only_reads(settings) if path.is_dir() else gguf_only_reads(settings)


def _is_encoder(path: Path, settings: Mapping[str, Any]) -> bool:
    if path.is_dir():
        return find_encoder(settings) is not None
    return str(settings.get("general.architecture")) in GGUF_ENCODERS


def _settings(path: Path) -> dict[str, Any]:
    if path.is_dir():
        file = path / CONFIG_NAME
        return read_json(file) if file.is_file() else {}
    is_one = path.is_file() and (is_gguf(path) or starts_as_gguf(path))
    return GGUFFile(path, in_torch=False, vocabulary=False).metadata if is_one else {}


def open_any(
    path: Path, *, settings: Mapping[str, Any] | None = None
) -> EncoderSource | ModelSource:
    """Open a model of any kind as the engine does; `problems` checks its tensors.

    Args:
        settings: replace config.json's, or a GGUF file's metadata, to learn what depends on them.

    Raises:
        CheckpointError: a part is missing, cut or damaged.
        UnsupportedModelError: the architecture or a setting is not supported.
    """
    found = _settings(path) if settings is None else settings
    if not reads_only(path, found):
        return open_unchecked(path, in_torch=False, settings=settings)
    if not _is_encoder(path, found):
        return open_decoder(path, settings)
    return _open_folder(path, settings) if path.is_dir() else _open_gguf(path, settings)


def problems(source: EncoderSource | ModelSource) -> Iterator[CheckpointError]:
    """Find every tensor that is missing, of another shape, or without a place in the model."""
    if isinstance(source, EncoderSource):
        return _tensor_problems(source)
    return tensor_problems(source)


def open_checked(path: Path) -> EncoderSource | ModelSource:
    """Open a model of any kind as the engine does, and check its tensors.

    Raises:
        CheckpointError: a part is missing, cut or of the wrong shape; names the first.
        UnsupportedModelError: the architecture or a setting is not supported.
    """
    source = open_any(path)
    for problem in problems(source):
        raise problem
    if isinstance(source, EncoderSource):
        return source
    return replace(source, notes=(*source.notes, *leftover_notes(leftovers(source))))


def settings_alone(path: Path) -> EncoderSettings | ModelSettings | None:
    """Read a folder's settings without its weights; None if no family describes the model.

    Raises:
        CheckpointError: config.json is missing or damaged, or a setting is.
        UnsupportedModelError: the architecture or a setting is not supported.
    """
    config = read_config(path)
    family = find_encoder(config)
    if family is None:
        return None if only_reads(config) else read_settings(path)
    return EncoderSettings(*read_encoder(family, config, str(path / CONFIG_NAME)))


def _open_folder(path: Path, settings: Mapping[str, Any] | None) -> EncoderSource:
    folder = SafetensorsFolder(path, in_torch=False)
    folder.config = folder.config if settings is None else dict(settings)
    family = find_encoder(folder.config)
    assert family is not None
    reader, spec = read_encoder(family, folder.config, str(path / CONFIG_NAME))
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
    return EncoderSource(path, spec, names, prefix, folder, reader)


def _open_gguf(path: Path, settings: Mapping[str, Any] | None) -> EncoderSource:
    file = GGUFFile(path, in_torch=False, vocabulary=False)
    file = file if settings is None else file.with_metadata(settings)
    spec, names = read_gguf_encoder(file)
    return EncoderSource(file.path, spec, names, "", GGUFTensors(file))


def _tensor_problems(source: EncoderSource) -> Iterator[CheckpointError]:
    spec, tensors, name_of = source.spec, source.tensors, source.path.name
    is_file = isinstance(tensors, GGUFTensors)
    settings = "its metadata" if is_file else CONFIG_NAME
    advice = (
        "use another file of the model"
        if is_file
        else f"take {CONFIG_NAME} and weights of one revision"
    )
    left = set(tensors.tensor_names())
    for name, shape in source.slots().items():
        stored = _stored_name(tensors, name)
        if stored not in left:
            yield CheckpointError(f"{name_of}: tensor {name} is missing; {advice}")
            continue
        if tuple(tensors.shape(stored)) != shape:
            yield CheckpointError(
                f"{name_of}: tensor {stored} has shape {tuple(tensors.shape(stored))}, but "
                f"{settings} asks for {shape}; {advice}"
            )
        left.discard(stored)
    for name in sorted(left):
        if not name.startswith(source.names.unused):
            yield CheckpointError(
                f"{name_of}: tensor {name} has no place in a {spec.architecture} model of "
                f"{len(spec.layers)} layers, as {settings} describes it; {advice}"
            )


def _stored_name(tensors: SafetensorsFolder | GGUFTensors, name: str) -> str:
    known = tensors.tensor_names()
    for new, old in _OLD_NAMES.items():
        if name.endswith(new) and name not in known:
            return name.removesuffix(new) + old
    return name
