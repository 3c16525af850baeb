"""Opens an EAGLE-3 head, trained for one model, from its own folder (arXiv 2503.01840).

At each token it reads the token's embedding and, for the previous token, the model's streams before
three layers, which a linear fuses into one hidden state. One layer, whose attention reads both
halves side by side, predicts the next token in a vocabulary of the model's frequent tokens.

Two layouts are read: that of the authors and of SpecForge, with a layer `midlayer.`, and that of
speculators, with a layer `layers.0.` and settings in a section.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.errors import ConfigError
from appliance.model.draft_head import HeadSource
from appliance.model.families.eagle3 import EAGLE3, is_eagle3
from appliance.model.leftovers import USED_ELSEWHERE
from appliance.model.names import JoinNames, TensorNames
from appliance.model.source import ModelSource, check_slots
from appliance.model.tensors import Role
from appliance.model_files.checkpoint import CONFIG_NAME, SafetensorsFolder
from appliance.quant.formats import open_weights

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from appliance.model.spec import DecoderSpec

_SECTION = "transformer_layer_config"
_LAYERS = ("midlayer.", "layers.0.")
_READS = "eagle_aux_hidden_state_layer_ids"
_FUSE = "fc"
_BESIDE = {"d2t", "t2d"}


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
