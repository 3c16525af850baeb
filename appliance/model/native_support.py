"""Says which models the CPU library supports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec

if TYPE_CHECKING:
    from appliance.model.source import ModelSource
    from appliance.model.spec import MixerSpec

HEAD_WIDTH_STEP = 16  # the library's vectors
MOST_HEAD_WIDTH = 512
MOST_LATENT = 1024


def why_unsupported(source: ModelSource) -> str | None:
    """Say why the CPU library does not support a model; None if it does."""
    for index, attention in source.spec.attention_layers.items():
        width = attention.head_dim
        if width % HEAD_WIDTH_STEP or width > MOST_HEAD_WIDTH:
            return (
                f"layer {index} has heads of {width} elements; the CPU library covers multiples "
                f"of {HEAD_WIDTH_STEP} up to {MOST_HEAD_WIDTH}"
            )
    for index, latent in source.spec.latent_layers.items():
        if latent.head_dim % HEAD_WIDTH_STEP or latent.width > MOST_LATENT:
            return (
                f"layer {index} has latents of {latent.width} elements; the CPU library covers "
                f"multiples of {2 * HEAD_WIDTH_STEP} up to {MOST_LATENT}"
            )
    for index, layer in enumerate(source.spec.layers):
        for width in _recurrent_widths(layer.mixer):
            if width % HEAD_WIDTH_STEP:
                return (
                    f"layer {index} has recurrent heads of {width} elements; the CPU library "
                    f"covers multiples of {HEAD_WIDTH_STEP}"
                )
    return None


def _recurrent_widths(mixer: MixerSpec | None) -> tuple[int, ...]:
    """Return the widths of a recurrent head that the library processes by vectors."""
    if isinstance(mixer, GatedDeltaSpec):
        return mixer.key_dim, mixer.value_dim
    return (mixer.state_dim, mixer.head_dim) if isinstance(mixer, Mamba2Spec) else ()
