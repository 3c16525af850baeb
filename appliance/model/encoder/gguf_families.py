"""Reads GGUF files of encoders, as llama.cpp's converter writes them (conversion/bert.py).

Such a file says little of its arithmetic: what an architecture does is fixed in llama.cpp
(src/models/*bert*.cpp), and its tensors say which biases there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.gguf.types import FLOAT_BITS, code_bits, held_bytes
from appliance.kernels import arrays
from appliance.kernels.activation import Activation
from appliance.model.encoder.spec import (
    EncoderExpertsSpec,
    EncoderLayerSpec,
    EncoderNames,
    EncoderSpec,
    HeadActivation,
    RankingSpec,
)
from appliance.model.families.gguf_config import GGUFSettings, gguf_layer_types
from appliance.model.spec import RopeSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.kernels.weights.weight import Weight

_RANK = 4  # value of pooling_type: a head judges pairs
_POOLINGS = (1, 2, 3)  # likewise: the mean, the first token's state, the last one's
_MEAN = 1  # of classifier.pooling_type, and llama.cpp's where a file has none
_THETA = 10000.0  # llama.cpp's, where a file has none
_PERIOD = 3  # likewise: every third layer of ModernBERT sees all
_ACTIVATIONS = {"gelu": Activation.GELU, "silu": Activation.SILU}
_SCALINGS = ("none", "")
_EPS_OF_RMS = "attention.layer_norm_rms_epsilon"  # where the converter puts ModernBERT's norm_eps

_NAMES = EncoderNames(
    prefixes=("",),
    tokens="token_embd",
    positions="position_embd",
    token_types="token_types",
    embedding_norm="token_embd_norm",
    layer="blk.{}",
    qkv=("attn_q", "attn_k", "attn_v"),
    attention_out="attn_output",
    attention_norm="attn_output_norm",
    up=("ffn_up",),
    down="ffn_down",
    mlp_norm="layer_output_norm",
    final_norm="output_norm",
    dense="cls",
    head_norm="cls.norm",
    router="ffn_gate_inp",
    expert_up="ffn_up_exps.weight",
    expert_down="ffn_down_exps.weight",
    experts_apart=True,
    classifier="cls.output",
    unused=("cls.", "rope_freqs."),
)


# Matrices that may have one row, whose second dimension llama.cpp's quantizer leaves out.
_ROWS = ("token_types.weight", "cls.output.weight")


class GGUFTensors:
    """The tensors of an encoder's file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file

    def tensor_names(self) -> list[str]:
        return self.file.tensor_names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.file.shape(name)
        return (1, *shape) if name in _ROWS and len(shape) == 1 else shape

    def load(self, name: str) -> Weight:
        """Read one tensor; see `GGUFFile.load`."""
        found: Any = self.file.load(name)
        return found.reshape(self.shape(name)) if arrays.is_array(found) else found

    def bytes_per_weight(self, name: str) -> float | None:
        """Return what a matrix takes as kernels hold it, scales included; None if it is dense."""
        kind = self.file.type(name)
        dense = code_bits(kind.name) is None and kind.name not in FLOAT_BITS
        return None if dense else held_bytes(kind)


@dataclass(frozen=True, slots=True)
class _File:
    settings: GGUFSettings
    shapes: dict[str, tuple[int, ...]]

    def has(self, name: str) -> bool:
        return name in self.shapes

    def rows(self, name: str) -> int:
        """Return the rows of a matrix; 0 without it."""
        return self.shapes[f"{name}.weight"][0] if self.has(f"{name}.weight") else 0


def _bert(file: _File) -> EncoderSpec:
    positions = file.rows("position_embd")
    spec = _read(file, Activation.GELU)
    return replace(
        spec, positions=positions, context_length=min(positions or 1, spec.context_length)
    )


def _rotated(file: _File) -> EncoderSpec:
    """Read Nomic's encoder, whose MLP has gates, or Jina's, whose MLP has none."""
    gated = file.has("blk.0.ffn_gate.weight")
    spec = _read(file, Activation.SILU if gated else Activation.GELU, gated=gated)
    theta = file.settings.number("rope.freq_base", _THETA)
    rope = RopeSpec(theta=theta, rotary_dim=spec.head_dim)
    return replace(spec, layers=(EncoderLayerSpec(rope=rope),) * len(spec.layers))


def _nomic_moe(file: _File) -> EncoderSpec:
    """Read Nomic's encoder with experts, whose converter leaves the bias of their sum out."""
    settings = file.settings
    every = settings.integer("moe_every_n_layers")
    if every < 2:
        raise settings.refuse("moe_every_n_layers", "2 and more")
    spec = _rotated(file)
    experts = EncoderExpertsSpec(
        settings.integer("expert_count"), settings.integer("expert_used_count"), bias=False
    )
    layers = (replace(layer, routed=i % every == 1) for i, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers), experts=experts)


def _modernbert(file: _File) -> EncoderSpec:
    settings = file.settings
    name = settings.text("hidden_activation", "gelu")
    if name not in _ACTIVATIONS:
        raise settings.refuse("hidden_activation", ", ".join(_ACTIVATIONS))
    spec = _read(file, _ACTIVATIONS[name], gated=True, norms_follow=False)
    far = settings.number("rope.freq_base", _THETA)
    near = settings.number("rope.freq_base_swa", far)
    window = settings.value("attention.sliding_window")
    slides = _slides(settings, len(spec.layers)) if window else [False] * len(spec.layers)
    reach = settings.integer("attention.sliding_window") // 2 if window else None
    layers = [
        EncoderLayerSpec(
            reach=reach if sliding else None,
            rope=RopeSpec(theta=near if sliding else far, rotary_dim=spec.head_dim),
            attention_norm=file.has(f"blk.{index}.attn_norm.weight"),
        )
        for index, sliding in enumerate(slides)
    ]
    mean = settings.value("classifier.pooling_type", _MEAN) == _MEAN
    head = RankingSpec(
        HeadActivation.GELU, mean=mean, normed=file.has("cls.norm.weight"), bias=False
    )
    return replace(spec, layers=tuple(layers), ranking=spec.ranking and head)


def _slides(settings: GGUFSettings, count: int) -> list[bool]:
    """Read which layers have a window: by a list, or all but every n-th, from the first on."""
    given = settings.value("attention.sliding_window_pattern")
    if isinstance(given, list):
        kinds = gguf_layer_types(settings, _PERIOD)
        return [kind == "sliding_attention" for kind in kinds]
    period = settings.integer("attention.sliding_window_pattern", _PERIOD)
    return [index % period != 0 for index in range(count)]


def _read(file: _File, activation: Activation, **form: Any) -> EncoderSpec:
    settings = file.settings
    if settings.text("rope.scaling.type", "none") not in _SCALINGS:
        raise settings.refuse("rope.scaling.type", "none")
    hidden, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    if hidden % heads:
        raise settings.refuse("attention.head_count", f"a divisor of embedding_length, {hidden}")
    eps = "attention.layer_norm_epsilon"
    if settings.value("pooling_type") == _RANK:
        form["ranking"] = RankingSpec(HeadActivation.TANH, bias=file.has("cls.bias"))
    return EncoderSpec(
        architecture="",
        hidden_size=hidden,
        vocab_size=file.rows("token_embd"),
        context_length=settings.integer("context_length"),
        num_heads=heads,
        intermediate_size=settings.integer("feed_forward_length"),
        activation=activation,
        norm_eps=settings.number(eps if settings.is_given(eps) else _EPS_OF_RMS),
        layers=(EncoderLayerSpec(),) * settings.integer("block_count"),
        token_types=file.rows("token_types"),
        norm_bias=file.has("token_embd_norm.bias"),
        attention_bias=file.has("blk.0.attn_output.bias"),
        up_bias=file.has("blk.0.ffn_up.bias"),
        down_bias=file.has("blk.0.ffn_down.bias"),
        **form,
    )


_MODERN_NAMES = replace(_NAMES, attention_norm="attn_norm", mlp_norm="ffn_norm")
_Read = Callable[[_File], EncoderSpec]
GGUF_ENCODERS: dict[str, tuple[_Read, EncoderNames]] = {
    "bert": (_bert, _NAMES),
    "nomic-bert": (_rotated, replace(_NAMES, up=("ffn_gate", "ffn_up"))),
    "nomic-bert-moe": (_nomic_moe, _NAMES),
    "jina-bert-v3": (_rotated, _NAMES),
    "modern-bert": (_modernbert, _MODERN_NAMES),
}
_RANKING = ("bert", "modern-bert")


def check_pooling(file: GGUFFile, *, ranks: bool) -> None:
    """Raise UnsupportedModelError for a file that does not say how it pools."""
    key = f"{file.metadata['general.architecture']}.pooling_type"
    kind = file.metadata.get(key)
    if kind not in (*_POOLINGS, *((_RANK,) if ranks else ())):
        raise UnsupportedModelError(
            f"{file.path.name}: {key} is {kind!r:.40}, so it is not known how hidden states become "
            "one vector; use a file that was made of a folder with modules.json, or that folder"
        )


def read_gguf_encoder(file: GGUFFile) -> tuple[EncoderSpec, EncoderNames]:
    """Build the spec, and the names of its tensors in the file.

    Raises:
        CheckpointError: a setting is missing, of the wrong type or out of range.
        UnsupportedModelError: a setting or a tensor asks for arithmetic that no code here has.
    """
    label = str(file.metadata["general.architecture"])
    read, names = GGUF_ENCODERS[label]
    check_pooling(file, ranks=label in _RANKING)
    settings = GGUFSettings(file, label)
    shapes = {name: GGUFTensors(file).shape(name) for name in file.tensor_names()}
    if "blk.0.attn_qkv.weight" in shapes:
        names = replace(names, qkv=("attn_qkv",))
    if "token_embd.weight" not in shapes:
        raise CheckpointError(
            f"{file.path.name} has no token_embd.weight; use another file of the model"
        )
    spec = replace(read(_File(settings, shapes)), architecture=label)
    if spec.ranking is not None and f"{names.dense}.weight" not in shapes:
        raise UnsupportedModelError(
            f"{file.path.name} asks for pooling by a head for ranking and has no tensor "
            f"{names.dense}.weight, without which its scores are not the model's; serve the folder "
            "that it was made from"
        )
    return spec, names
