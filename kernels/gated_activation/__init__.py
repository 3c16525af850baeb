"""The gate of a gated MLP: act(gate) * up."""

from appliance.kernels.gated_activation.reference import gated_activation

__all__ = ["gated_activation"]
