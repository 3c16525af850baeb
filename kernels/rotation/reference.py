"""The rotation of inputs by definition, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.weights import trellis

if TYPE_CHECKING:
    from torch import Tensor


def rotated(x: Tensor) -> Tensor:
    """Multiply inputs by signs, then transform each 64 neighbours; see `TrellisWeight`.

    Args:
        x: (num_tokens, in_features), a multiple of 64 inputs.

    Returns:
        Same shape and dtype.
    """
    found: Tensor = trellis.rotated(x.float())
    return found.to(x.dtype)
