"""Opens an encoder's folder and checks it before its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.checkpoint import CONFIG_NAME, SafetensorsFolder
from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.files import read_json
from appliance.model.encoder.families import find_encoder, read_encoder
from appliance.model.encoder.spec import encoder_slots

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from appliance.model.encoder.spec import EncoderNames, EncoderSpec

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
    folder: SafetensorsFolder

    def load(self, name: str) -> Tensor:
        """Read one tensor, as a `HostArray`."""
        return self.folder.load(_stored_name(self.folder, name))


def is_encoder(path: Path) -> bool:
    """Return True if the folder's config is of an encoder."""
    file = path / CONFIG_NAME
    return file.is_file() and find_encoder(read_json(file)) is not None


def open_encoder(path: Path) -> EncoderSource:
    """Open the folder of an encoder.

    Raises:
        CheckpointError: a part is missing, cut or of the wrong shape; names the first.
        UnsupportedModelError: a setting that no code here covers.
    """
    folder = SafetensorsFolder(path, in_torch=False)
    family = find_encoder(folder.config)
    assert family is not None, "ask is_encoder first"
    spec = read_encoder(family, folder.config, str(path / CONFIG_NAME))
    names = family.names
    left = set(folder.tensor_names())
    prefix = next(
        (one for one in names.prefixes if f"{one}{names.tokens}.weight" in left), names.prefixes[0]
    )
    slots = encoder_slots(spec, names, prefix)
    if not any(_stored_name(folder, name) in left for name in slots):
        known = ", ".join(f"{one}{names.tokens}.weight" for one in names.prefixes)
        raise UnsupportedModelError(
            f"{path.name}: {CONFIG_NAME} describes a {family.model_type} encoder, and none of its "
            f"tensors is here by a name that is known: looked for {known}; the first of the "
            f"{len(left)} stored are {', '.join(sorted(left)[:3])}. If they are the encoder's, "
            "load the folder with transformers and save it again, which writes known names"
        )
    for name, shape in slots.items():
        stored = _stored_name(folder, name)
        if stored not in left:
            raise CheckpointError(
                f"{path.name}: tensor {name} is missing;"
                " take config.json and weights of one revision"
            )
        if tuple(folder.shape(stored)) != shape:
            raise CheckpointError(
                f"{path.name}: tensor {stored} has shape {tuple(folder.shape(stored))}, but "
                f"{CONFIG_NAME} asks for {shape}; take config.json and weights of one revision"
            )
        left.discard(stored)
    for name in sorted(left):
        if not name.startswith(names.unused):
            raise CheckpointError(
                f"{path.name}: tensor {name} has no place in a {spec.architecture} model of "
                f"{len(spec.layers)} layers; its {CONFIG_NAME} belongs to another model"
            )
    return EncoderSource(path, spec, names, prefix, folder)


def _stored_name(folder: SafetensorsFolder, name: str) -> str:
    known = folder.tensor_names()
    for new, old in _OLD_NAMES.items():
        if name.endswith(new) and name not in known:
            return name.removesuffix(new) + old
    return name
