"""Multiplies activations by a packed or dense weight, laid out once for its backend."""

from appliance.kernels.packed_matmul.reference import prepare_linear

__all__ = ["prepare_linear"]
