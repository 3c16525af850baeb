"""The declaration of a model family: how to read its config, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from appliance.model.families.limits import check_spec
from appliance.model.families.reader import ConfigReader
from appliance.model.names import DraftHeadNames, TensorNames

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.spec import DecoderSpec


def _any(settings: Mapping[str, Any]) -> bool:
    return True


def gguf_has_experts(settings: Mapping[str, Any]) -> bool:
    """Return True for a GGUF file's settings, without their prefix, of a model with experts."""
    return bool(settings.get("expert_count"))


@dataclass(frozen=True, slots=True)
class GGUFMapping:
    """Differences between a family's GGUF files and its Hugging Face checkpoints.

    Attributes:
        architecture: value of `general.architecture`.
        config: converts the file's metadata to a Hugging Face config.
        names: GGUF names of the tensors.
        interleaved_rope: query and key rows of a head are stored as pairs (first half, second half,
            first half, ...) instead of one half after the other.
        norm_shift: the constant that the writer added to norm weights.
        tiled_values: value heads of Gated DeltaNet lie by their place under a key head; see
            `gguf_gated_delta`.
        other_names: those of files whose first layer has its norm under another name.
        own_names: names that stand for a checkpoint's, where tensors are split as no checkpoint
            splits them; None: the family's.
        is_of: of several families of one architecture, says from a file's settings whether it is
            of this one. The last of them in the registry is asked
            first.
    """

    architecture: str
    config: Callable[[GGUFFile], dict[str, Any]]
    names: TensorNames
    interleaved_rope: bool = False
    norm_shift: float = 0.0
    tiled_values: bool = False
    other_names: TensorNames | None = None
    own_names: TensorNames | None = None
    is_of: Callable[[Mapping[str, Any]], bool] = _any


@dataclass(frozen=True, slots=True)
class Family:
    """Models with the same config and tensor names.

    Attributes:
        name: for people.
        model_type: `model_type` of its Hugging Face config.
        architectures: `architectures` of its Hugging Face configs.
        read: builds the spec from a config.
        names: Hugging Face names of the tensors.
        other_names: those of checkpoints whose first layer has its norm under another name.
        gguf: reads its GGUF files; None if it cannot.
        draft_head: names of the head that drafts, which its checkpoints may have.
    """

    name: str
    model_type: str
    architectures: tuple[str, ...]
    read: Callable[[ConfigReader], DecoderSpec]
    names: TensorNames = field(default_factory=TensorNames)
    other_names: TensorNames | None = None
    gguf: GGUFMapping | None = None
    draft_head: DraftHeadNames | None = None

    def spec(self, config: Mapping[str, Any], origin: str = "config.json") -> DecoderSpec:
        """Build the spec of the decoder that a Hugging Face config describes.

        `origin` names the settings' file in messages.

        Raises:
            CheckpointError: a setting is missing, of the wrong type or out of range.
            UnsupportedModelError: a setting asks for arithmetic that no code here has.
        """
        reader = ConfigReader(config, origin)
        spec = self.read(reader)
        reader.refuse_unread()
        if spec.has_experts:
            reader.refuse_unknown_routing()
        check_spec(spec, origin)
        return spec
