"""Says which encoders the C library supports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.model.native_support import HEAD_WIDTH_STEP, MOST_HEAD_WIDTH

if TYPE_CHECKING:
    from appliance.model.encoder.spec import EncoderSpec


def why_unsupported(spec: EncoderSpec) -> str | None:
    """Say why the C library does not cover an encoder; None if it does."""
    if spec.head_dim % HEAD_WIDTH_STEP or spec.head_dim > MOST_HEAD_WIDTH:
        return (
            f"its heads have {spec.head_dim} elements; the CPU library covers multiples of"
            f" {HEAD_WIDTH_STEP} up to {MOST_HEAD_WIDTH}"
        )
    if spec.experts is not None:
        return "its layers have experts"
    if spec.distance_buckets or spec.slopes:
        return "its scores have biases by distance"
    if not spec.norms_follow and spec.layers[0].attention_norm:
        return "its first layer norms the embedding twice"
    if spec.token_types > 1 and spec.ranking is not None and not spec.positions:
        return "it tells texts of a pair apart without learned positions"
    return None
