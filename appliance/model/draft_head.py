"""Opens draft heads: a checkpoint's own, or an EAGLE-3 head from a folder of its own.

Multi-token prediction: at each token it reads the token's embedding and the previous token's hidden
state after the model's last norm, and predicts the next token (DeepSeek-V3, arXiv 2412.19437).
Embedding and output matrix are the model's.

EAGLE-3 (arXiv 2503.01840) was trained for one model: at each token it reads the token's embedding
and, for the previous token, the model's streams before three layers, which a linear fuses into one
hidden state. One layer, whose attention reads both halves side by side, predicts the next token in
a vocabulary of the model's frequent tokens. Two layouts are read: that of the authors and of
SpecForge, with a layer `midlayer.`, and that of speculators, with a layer `layers.0.` and settings
in a section.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.errors import ConfigError
from appliance.gguf import GGUFFile
from appliance.model.expert_tensors import separate_experts
from appliance.model.families.eagle3 import EAGLE3, is_eagle3
from appliance.model.gguf_weights import GGUFWeights
from appliance.model.leftovers import USED_ELSEWHERE
from appliance.model.names import JoinNames, TensorNames
from appliance.model.source import ModelSource, check_slots
from appliance.model.spec import AttentionSpec, ExpertsSpec, LatentAttentionSpec
from appliance.model.tensors import Role, TensorSlot, norm_slots
from appliance.model_files.checkpoint import CONFIG_NAME, SafetensorsFolder
from appliance.model_files.files_beside import draft_heads_beside
from appliance.quant.formats import open_weights

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from appliance.model.names import DraftHeadNames
    from appliance.model.spec import DecoderSpec, LayerSpec
    from appliance.quant.formats import WeightReader


_KINDS = {"attention": "attention", "*": "attention", "moe": "experts", "E": "experts"}
_SECTION = "transformer_layer_config"
_LAYERS = ("midlayer.", "layers.0.")
_READS = "eagle_aux_hidden_state_layer_ids"
_FUSE = "fc"
_BESIDE = {"d2t", "t2d"}
# Of GGUF files, in a block behind the model's layers; gguf-py's `constants.py` has the names.
_STORED_JOIN = ("enorm", "hnorm", "eh_proj")
_STORED_NORM = "nextn.shared_head_norm"


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
        own = (slot for slot in self.source.slots() if slot.role not in self.shared)
        return [*own, *self.join_slots()]

    def join_slots(self) -> list[TensorSlot]:
        """List the tensors that join the head's inputs."""
        spec = self.source.spec
        return [
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
    """Open a checkpoint's first draft head, or one in a file `mtp-*.gguf` beside a GGUF file.

    Raises:
        ConfigError: there is none, or its kind is not supported.
        CheckpointError: a part of it is missing or of the wrong shape.
    """
    head = served_head(model)
    if head is not None:
        return head
    names = _names_of(model)
    if names is None:
        raise _refusal(model, "brings no head that drafts")
    raise _refusal(model, f"names a head in {names.count}, but has no tensors of it")


def served_head(model: ModelSource) -> HeadSource | None:
    """Open what `open_head` opens; None if there is none.

    Raises:
        ConfigError: its kind is not supported.
        CheckpointError: a part of it is missing or of the wrong shape.
    """
    return find_head(model) or _head_beside(model)


def _head_beside(model: ModelSource) -> HeadSource | None:
    """Open the head in a file of its own, as llama.cpp's converter writes it with `--mtp`."""
    names, mapping = model.family.draft_head, model.family.gguf
    if names is None or mapping is None or not isinstance(model.weights, GGUFWeights):
        return None
    for path in draft_heads_beside(model.path):
        file = GGUFFile(path, in_torch=False, vocabulary=False)
        settings = file.metadata
        count = settings.get(f"{mapping.architecture}.nextn_predict_layers") or 0
        blocks = settings.get(f"{mapping.architecture}.block_count")
        if blocks != len(model.spec.layers) + count:
            continue
        beside = replace(
            model,
            path=path,
            config=model.config | {names.count: count},
            weights=GGUFWeights(file, model.family, model.spec),
        )
        if (head := find_head(beside)) is not None:
            return head
    return None


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
    own = replace(model.family.names, layer=layer, final_norm=names.final_norm.format(**ends))
    spec, family = replace(model.spec, layers=layers), replace(model.family, names=own)
    head = HeadSource(replace(model, family=family, spec=spec), join, names.chains_normed)
    weights = _weights_of(model, head, in_torch)
    if weights is None:
        return None
    source = replace(head.source, weights=weights)
    head = replace(head, source=source)
    _check_width(model, head)
    check_slots(source, head.slots(), set(weights.tensor_names()))
    return head


def _names_of(model: ModelSource) -> DraftHeadNames | None:
    """Return the names of the head's tensors, if the settings declare a head."""
    names = model.family.draft_head
    return names if names is not None and model.config.get(names.count) else None


def _weights_of(model: ModelSource, head: HeadSource, in_torch: bool) -> WeightReader | None:
    """Open the tensors of a head; None if there are none."""
    source, join = head.source, head.join
    if isinstance(model.weights, GGUFWeights):
        if len(source.spec.layers) > 1:
            return None  # llama.cpp's converter folds them into one block
        join_slots = {slot.name.removesuffix(".weight"): slot for slot in head.join_slots()}
        parts = (join.token_norm, join.hidden_norm, join.linear)
        beside = {
            f"nextn.{stored}.weight": join_slots[name]
            for stored, name in zip(_STORED_JOIN, parts, strict=True)
        }
        block, spec = len(model.spec.layers), source.spec
        return model.weights.of_block(block, source.family, spec, _STORED_NORM, beside)
    weights = open_weights(SafetensorsFolder(model.path, in_torch=in_torch))
    if f"{join.linear}.weight" not in weights.tensor_names():
        return None
    spec, names = source.spec, source.family.names
    return separate_experts(weights, spec, names, model.path.name) if spec.has_experts else weights


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


def open_eagle(path: Path, model: ModelSource) -> HeadSource:
    """Open the EAGLE-3 head in a folder for a model.

    Raises:
        ConfigError: the folder has no head, or one for another model.
        CheckpointError: a part of it is missing or of the wrong shape.
        UnsupportedModelError: a setting asks for unsupported arithmetic.
    """
    return _Opening(path, model).head()


@dataclass(frozen=True, slots=True)
class _Opening:
    path: Path
    model: ModelSource

    def head(self) -> HeadSource:
        if not self.path.is_dir():
            raise self._refusal("PATH", "a file", "a folder with config.json and safetensors")
        folder = SafetensorsFolder(self.path, in_torch=False)
        config = folder.config
        settings = self._settings(config)
        weights = open_weights(folder)
        present = set(weights.tensor_names())
        layer = next((one for one in _LAYERS if f"{one}hidden_norm.weight" in present), _LAYERS[0])
        settings["attention_bias"] = f"{layer}self_attn.q_proj.bias" in present
        spec = EAGLE3.spec(settings, str(self.path / CONFIG_NAME))
        self._check_width(config, spec)
        names = TensorNames("embed_tokens", "norm", head="lm_head", layer=layer)
        family = replace(EAGLE3, names=names)
        join = JoinNames(
            f"{layer}input_layernorm",
            f"{layer}hidden_norm",
            stream_is_normed=config.get("norm_before_residual") is True,
        )
        head = HeadSource(
            ModelSource(self.path, family, settings, spec, weights),
            join,
            chains_normed=False,
            shared=() if f"{names.embedding}.weight" in present else (Role.EMBEDDING,),
            reads=self._reads(config),
            fuse=_FUSE,
            names=self._names(folder, spec),
        )
        self._check_fuse(head, present)
        slots = head.slots()
        check_slots(head.source, slots, present)
        unread = present - {slot.name for slot in slots} - _BESIDE
        for name in sorted(unread):
            if not name.endswith(USED_ELSEWHERE):
                raise self._refusal(name, "a tensor", "absent: EAGLE-3 has none of that name")
        return head

    def _settings(self, config: dict[str, Any]) -> dict[str, Any]:
        section = config.get(_SECTION)
        found = dict(section) if isinstance(section, dict) else dict(config)
        if isinstance(section, dict):
            kind = config.get("speculators_model_type")
            if kind != "eagle3":
                raise self._refusal("speculators_model_type", kind, "eagle3")
        elif not is_eagle3(config):
            wanted = f"[{EAGLE3.architectures[0]!r}], or another of EAGLE-3 with draft_vocab_size"
            raise self._refusal("architectures", config.get("architectures"), wanted)
        own = {key: config[key] for key in ("draft_vocab_size",) if key in config}
        return found | own

    def _check_width(self, config: dict[str, Any], spec: DecoderSpec) -> None:
        wanted = self.model.spec.hidden_size
        found = {"hidden_size": spec.hidden_size}
        if config.get("target_hidden_size") is not None:
            found["target_hidden_size"] = config["target_hidden_size"]
        for key, width in found.items():
            if width != wanted:
                raise self._refusal(key, width, f"{wanted}, the model's; take a head made for it")

    def _reads(self, config: dict[str, Any]) -> tuple[int, ...]:
        """Return the layers of the model whose input streams the head reads.

        A list in the config itself names these layers. A list in `eagle_config`, as SpecForge and
        ModelOpt write it, names the layers just before them.
        """
        count = len(self.model.spec.layers)
        section = config.get("eagle_config")
        section = section if isinstance(section, dict) else {}
        if section.get("use_aux_hidden_state") is False:
            raise self._refusal("use_aux_hidden_state", False, "true, as EAGLE-3 has it")
        behind = section.get(_READS)
        listed = config.get(_READS) if behind is None else behind
        if listed is None:
            listed = [2, count // 2, count - 3]
        numbers = listed if isinstance(listed, list) else [listed]
        shift = 0 if behind is None else 1
        fits = all(type(one) is int and 0 <= one + shift < count for one in numbers)
        if not numbers or not fits:
            wanted = f"layers of the model, which has {count}; take a head made for it"
            raise self._refusal(_READS, listed, wanted)
        return tuple(one + shift for one in numbers)

    def _names(self, folder: SafetensorsFolder, spec: DecoderSpec) -> NDArray[np.int64] | None:
        """Return the model's id of each token of the head."""
        present = set(folder.tensor_names())
        if "t2d" in present and folder.shape("t2d") != (spec.read_tokens,):
            raise self._refusal(
                "t2d", f"a shape of {folder.shape('t2d')}", f"({spec.read_tokens},), by vocab_size"
            )
        if "d2t" not in present:
            if spec.vocab_size == spec.read_tokens:
                return None
            raise self._refusal("d2t", "no tensor", f"{spec.vocab_size} numbers of tokens")
        shifts = folder.load("d2t").numpy()
        names: NDArray[np.int64] = np.arange(len(shifts), dtype=np.int64) + shifts.astype(np.int64)
        is_whole = shifts.shape == (spec.vocab_size,)
        if not is_whole or names.min() < 0 or names.max() >= spec.num_embedded:
            wanted = f"{spec.vocab_size} tokens below {spec.num_embedded}"
            raise self._refusal("d2t", "other numbers", wanted)
        return names

    def _check_fuse(self, head: HeadSource, present: set[str]) -> None:
        (slot,) = head.width_slots()
        if slot.name in present and tuple(head.source.weights.shape(slot.name)) != slot.shape:
            raise self._refusal(
                slot.name,
                f"a shape of {tuple(head.source.weights.shape(slot.name))}",
                f"{slot.shape}, for {len(head.reads)} layers of a model of"
                f" {head.source.spec.hidden_size} elements; take a head made for it",
            )

    def _refusal(self, field: str, found: object, wanted: str) -> ConfigError:
        return ConfigError(
            f"--speculate eagle={self.path.name}: {field} is {found!r} there, and has to be"
            f" {wanted}; or use --speculate auto"
        )
