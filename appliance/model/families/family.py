"""Declaration of a model family: how to read its config, and its tensors' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from appliance.model.families.limits import check_spec
from appliance.model.families.reader import ClassDefaults, ConfigReader, class_defaults
from appliance.model.names import DraftHeadNames, TensorNames

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.spec import DecoderSpec


def _any(settings: Mapping[str, Any]) -> bool:
    return True


def gguf_has_experts(settings: Mapping[str, Any]) -> bool:
    """Return True if a GGUF file's settings, without prefix, describe experts."""
    return bool(settings.get("expert_count"))


@dataclass(frozen=True, slots=True)
class GGUFMapping:
    """Differences between a family's GGUF files and its Hugging Face checkpoints.

    Attributes:
        architecture: value of `general.architecture`.
        config: converts the file's metadata to a Hugging Face config.
        interleaved_rope: query and key rows of a head are stored as pairs (first half, second half,
            first half, ...) instead of halves.
        norm_shift: constant that the writer added to norm weights.
        tiled_values: value heads of Gated DeltaNet are ordered by their place under a key head; see
            `gguf_weights.as_in_checkpoints`.
        other_names: for files whose first layer's norm has another name.
        own_names: Hugging Face names for tensors that only GGUF files split; None: the family's.
        two_way: labels of files that are this family's but for attention in both directions.
        is_of: tells by a file's settings if it is of this family, for families that share an
            architecture. The last one in the registry is asked first.
    """

    architecture: str
    config: Callable[[GGUFFile], dict[str, Any]]
    names: TensorNames
    interleaved_rope: bool = False
    norm_shift: float = 0.0
    tiled_values: bool = False
    other_names: TensorNames | None = None
    own_names: TensorNames | None = None
    two_way: tuple[str, ...] = ()
    is_of: Callable[[Mapping[str, Any]], bool] = _any


@dataclass(frozen=True, slots=True)
class Family:
    """Models with the same config and tensor names.

    Attributes:
        other_names: for checkpoints whose first layer's norm, or whose routers, have another name.
        covers: tells by a config if its arithmetic can be described here; transformers' modules
            run the others.
        gguf: reads its GGUF files; None if not supported.
        labelled: mapping of the family whose label its GGUF files have, if they have no own; they
            are read as that family's.
        draft_head: names of the draft head in its checkpoints, if they can have one.
        defaults: of its maker's configuration class, if transformers has none.
    """

    name: str
    model_type: str
    architectures: tuple[str, ...]
    read: Callable[[ConfigReader], DecoderSpec]
    names: TensorNames = field(default_factory=TensorNames)
    other_names: TensorNames | None = None
    covers: Callable[[Mapping[str, Any]], bool] = _any
    gguf: GGUFMapping | None = None
    labelled: GGUFMapping | None = None
    draft_head: DraftHeadNames | None = None
    defaults: ClassDefaults | None = None

    def spec(self, config: Mapping[str, Any], origin: str = "config.json") -> DecoderSpec:
        """Build the decoder's spec from a Hugging Face config.

        `origin` names the settings' file in messages.

        Raises:
            CheckpointError: a setting is missing, of the wrong type or out of range.
            UnsupportedModelError: a setting asks for unsupported arithmetic.
        """
        reader = self.reader(config, origin)
        spec = self.read(reader)
        reader.refuse_unread()
        if spec.has_experts:
            reader.refuse_unknown_routing()
        check_spec(spec, origin)
        return spec

    def reader(self, config: Mapping[str, Any], origin: str = "config.json") -> ConfigReader:
        """Return a reader of a Hugging Face config that knows its class's defaults."""
        usual = class_defaults(config.get("model_type")) or class_defaults(self.model_type)
        return ConfigReader(config, origin, usual or self.defaults)
