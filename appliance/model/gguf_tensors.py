"""Accounts for the tensors of a GGUF file: names that vary, optional biases, and unused tensors.

The rules are llama.cpp's (src/llama-model.cpp, src/models): every linear may have a bias of its
own, query, key and value may share one tensor, and a tensor that nothing reads is an error. Knows
no family.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.model.recurrent_spec import Mamba2Spec, ShortConvSpec
from appliance.model.rope import distinct_ropes
from appliance.model.spec import AttentionSpec, LatentAttentionSpec, MLPSpec, RopeScaling

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Set

    from appliance.model.families.family import Family
    from appliance.model.names import TensorNames
    from appliance.model.spec import DecoderSpec, LayerSpec, MixerSpec

FUSED = "attn_qkv"  # rows of queries, then of keys, then of values
APART = ("attn_q", "attn_k", "attn_v")
_OWN_APART = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

# How names of other parts of a model begin, which Ollama keeps in the same file.
OTHER_PARTS = ("v.", "mm.", "a.", "s.")

FREQUENCY_DIVISORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"

_BLOCK = re.compile(r"blk\.(\d+)\.")
# Tensors without effect on generated text, and why.
_UNUSED = {
    r".*\.input_scale": "range of a linear's inputs where they are rounded; here they are not",
    r"cls(\.output)?\.(weight|bias)": "a head that ranks or classifies a text",
    r"blk\.\d+\.attn_rot_embd(\..*)?": "rotary frequencies, which the settings give as well",
}


def names_of_file(family: Family, present: Set[str]) -> tuple[TensorNames, TensorNames]:
    """Return a file's names of tensors as Hugging Face would have them, and as they are stored."""
    assert family.gguf is not None
    own = family.gguf.own_names or family.names
    stored, others = family.gguf.names, family.gguf.other_names
    if others is not None and f"{others.in_layer(0, others.mixer_norm)}.weight" in present:
        stored = others
    parts = [f"{stored.in_layer(0, part)}.weight" for part in APART]
    if stored.qkv == (FUSED,) and present >= set(parts):
        own = replace(own, qkv=_OWN_APART)
    return own, names_beside(own, stored)


def names_beside(own: TensorNames, stored: TensorNames) -> TensorNames:
    """Return the names of a file whose query, key and value are apart if those of `own` are."""
    return replace(stored, qkv=APART) if len(own.qkv) > len(stored.qkv) else stored


def with_stored_biases(spec: DecoderSpec, stored: TensorNames, present: Set[str]) -> DecoderSpec:
    """Give linears the biases that a file has beyond those that its settings ask for.

    A linear that shares its spec's switch but has no bias in the file has one of zeros.
    """
    layers = tuple(
        _with_biases(layer, index, stored, present) for index, layer in enumerate(spec.layers)
    )
    return spec if layers == spec.layers else replace(spec, layers=layers)


def _with_biases(layer: LayerSpec, index: int, stored: TensorNames, present: Set[str]) -> LayerSpec:
    def has(parts: Iterable[str]) -> bool:
        return any(f"{stored.in_layer(index, part)}.bias" in present for part in parts)

    mlp = layer.mlp
    if isinstance(mlp, MLPSpec) and not mlp.bias and has((*stored.gate_up, stored.down)):
        mlp = replace(mlp, bias=True)
    mixer: MixerSpec | None = layer.mixer
    match mixer:
        case AttentionSpec():
            mixer = replace(
                mixer,
                qkv_bias=mixer.qkv_bias or has((*stored.qkv, FUSED)),
                output_bias=mixer.output_bias or has((stored.output,)),
            )
        case LatentAttentionSpec():
            parts = (stored.latent.query_down, stored.latent.token, stored.output)
            mixer = replace(mixer, bias=mixer.bias or has(parts))
        case ShortConvSpec():
            own = stored.short_conv
            parts = (own.input, own.filter, own.output)
            mixer = replace(mixer, bias=mixer.bias or has(parts))
        case Mamba2Spec():
            names = stored.mamba2
            mixer = replace(
                mixer,
                bias=mixer.bias or has((names.input, names.output)),
                filter_bias=mixer.filter_bias or has((names.filter,)),
            )
    return replace(layer, mixer=mixer, mlp=mlp)


def unplaced(
    names: Iterable[str],
    spec: DecoderSpec,
    stored: TensorNames,
    num_blocks: int,
    elsewhere: Container[str],
) -> list[str]:
    """Return those of a file's tensors without slots that must not be ignored.

    Args:
        num_blocks: the file's, of which the last ones may predict further tokens.
        elsewhere: tensors that are read where vectors are made.
    """
    unread = tuple(
        f"{stored.in_layer(index, part)}."
        for index, mixer in spec.attention_layers.items()
        if mixer.kv_layer is not None
        for part in (*stored.qkv[1:], stored.key_norm)
    )
    factors = _factors(spec)

    def is_explained(name: str) -> bool:
        if name in elsewhere or name in factors or name.startswith(unread):
            return True
        block = _BLOCK.match(name)
        if block is not None and len(spec.layers) <= int(block[1]) < num_blocks:
            return True
        return is_unused(name)

    return sorted(name for name in names if not is_explained(name))


def is_unused(name: str) -> bool:
    """Return True for a tensor that changes no generated text, whatever the architecture."""
    return name.startswith(OTHER_PARTS) or any(re.fullmatch(p, name) for p in _UNUSED)


def _factors(spec: DecoderSpec) -> frozenset[str]:
    """Return the tensors of frequency factors that the settings were read from."""
    kinds = {rope.scaling for rope in distinct_ropes(spec)}
    if RopeScaling.LONGROPE in kinds:
        return frozenset({FREQUENCY_DIVISORS, LONG_FACTORS, SHORT_FACTORS})
    return frozenset({FREQUENCY_DIVISORS} if RopeScaling.PROPORTIONAL in kinds else ())
