"""Opens a checkpoint's own draft head: multi-token prediction.

At each token it reads the token's embedding and the previous token's hidden state after the model's
last norm, and predicts the next token (DeepSeek-V3, arXiv 2412.19437). Embedding and output matrix
are the model's. `eagle_head` opens heads from folders of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from appliance.errors import ConfigError
from appliance.model.expert_tensors import separate_experts
from appliance.model.names import JoinNames
from appliance.model.source import ModelSource, check_slots
from appliance.model.spec import AttentionSpec, ExpertsSpec, LatentAttentionSpec
from appliance.model.tensors import Role, TensorSlot, norm_slots
from appliance.model_files.checkpoint import SafetensorsFolder
from appliance.quant.formats import open_weights

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from appliance.model.names import DraftHeadNames
    from appliance.model.spec import DecoderSpec, LayerSpec

_KINDS = {"attention": "attention", "*": "attention", "moe": "experts", "E": "experts"}


@dataclass(frozen=True, slots=True)
class HeadSource:
    """A checked draft head whose weights can be read one by one.

    Attributes:
        source: its layers and last norm, with embedding and output matrix.
        join: names of the parts that join embedding and hidden state.
        chains_normed: see `DraftHeadNames`.
        shared: roles of tensors that are the model's.
        reads: layers of the model whose input streams the head reads; empty: it reads the hidden
            states after the last norm.
        fuse: full name, without `.weight`, of the linear that fuses these streams.
        names: (head's vocabulary size,) int64, the model's ids of the head's tokens; None if equal.
    """

    source: ModelSource
    join: JoinNames
    chains_normed: bool
    shared: tuple[Role, ...] = (Role.EMBEDDING, Role.HEAD)
    reads: tuple[int, ...] = ()
    fuse: str = ""
    names: NDArray[np.int64] | None = field(default=None, compare=False)

    def slots(self) -> list[TensorSlot]:
        """List the head's own tensors."""
        spec = self.source.spec
        return [
            *(slot for slot in self.source.slots() if slot.role not in self.shared),
            *norm_slots(self.join.token_norm, spec.hidden_size, spec.final_norm),
            *norm_slots(self.join.hidden_norm, spec.hidden_size, spec.final_norm),
            *self.width_slots(),
        ]

    def width_slots(self) -> list[TensorSlot]:
        """List the linears that map the head's inputs to the stream's width."""
        hidden = self.source.spec.hidden_size
        found = {self.join.linear: 2, self.fuse: len(self.reads)}
        return [
            TensorSlot(f"{name}.weight", (hidden, count * hidden), Role.WIDTH)
            for name, count in found.items()
            if name
        ]


def open_head(model: ModelSource) -> HeadSource:
    """Open a checkpoint's first draft head.

    Raises:
        ConfigError: there is none, or its kind is not supported.
        CheckpointError: a part of it is missing or of the wrong shape.
    """
    head = find_head(model)
    if head is not None:
        return head
    names = _names_of(model)
    if names is None:
        raise _refusal(model, "brings no head that drafts")
    raise _refusal(model, f"names a head in {names.count}, but has no tensors of it")


def find_head(model: ModelSource, *, in_torch: bool = False) -> HeadSource | None:
    """Open a checkpoint's first draft head; None if it has no tensors of one.

    Args:
        in_torch: see `open_model`.

    Raises:
        ConfigError: its kind is not supported.
        CheckpointError: a part of it is missing or of the wrong shape.
    """
    names = _names_of(model)
    if names is None:
        return None
    layers = _layers(model.spec, model.config, names)
    behind = model.family.names.layer.format(len(model.spec.layers))
    layer = names.layer or behind
    ends = {"first": layer.format(0), "last": layer.format(len(layers) - 1)}
    join = JoinNames(
        names.join.token_norm.format(**ends),
        names.join.hidden_norm.format(**ends),
        names.join.linear.format(**ends),
    )
    weights = open_weights(SafetensorsFolder(model.path, in_torch=in_torch))
    if f"{join.linear}.weight" not in weights.tensor_names():
        return None
    own = replace(model.family.names, layer=layer, final_norm=names.final_norm.format(**ends))
    spec = replace(model.spec, layers=layers)
    if spec.has_experts:
        weights = separate_experts(weights, spec, own, model.path.name)
    family = replace(model.family, names=own)
    source = replace(model, family=family, spec=spec, weights=weights)
    head = HeadSource(source, join, names.chains_normed)
    _check_width(model, head)
    check_slots(source, head.slots(), set(weights.tensor_names()))
    return head


def _names_of(model: ModelSource) -> DraftHeadNames | None:
    """Return the names of the head's tensors, if the settings declare a head."""
    names = model.family.draft_head
    if names is None or not model.path.is_dir() or not model.config.get(names.count):
        return None
    return names


def _refusal(model: ModelSource, why: str) -> ConfigError:
    return ConfigError(
        f"--speculate mtp: {model.path.name} {why}; use --speculate auto, or"
        " draft=MODEL with a smaller model of the same family"
    )


def _check_width(model: ModelSource, head: HeadSource) -> None:
    (slot,) = head.width_slots()
    shape = tuple(head.source.weights.shape(slot.name))
    if shape != slot.shape:
        raise _refusal(
            model,
            f"has a head of another hidden size: {slot.name} has shape {shape}, and hidden states"
            f" of {model.spec.hidden_size} elements need {slot.shape}",
        )


def _layers(
    spec: DecoderSpec, config: dict[str, Any], names: DraftHeadNames
) -> tuple[LayerSpec, ...]:
    """Return the head's layers, which equal some of the model's."""
    if not names.kinds:
        return (spec.layers[max(spec.cache_layers)],)
    listed = next((config[key] for key in names.kinds if config.get(key)), "*E")
    found = []
    for kind in listed:
        layer = next((one for one in reversed(spec.layers) if _is(_KINDS.get(kind), one)), None)
        if layer is None:
            raise ConfigError(
                f"--speculate mtp: the head has a layer of kind {kind!r}, and the model has no such"
                " layer that can draft; use --speculate auto"
            )
        found.append(layer)
    return tuple(found)


def _is(kind: str | None, layer: LayerSpec) -> bool:
    if kind == "attention":
        return isinstance(layer.mixer, AttentionSpec | LatentAttentionSpec)
    return kind == "experts" and isinstance(layer.mlp, ExpertsSpec)
