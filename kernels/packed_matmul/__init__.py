"""Multiplying activations by a weight that is packed, or dense, laid out once for its backend."""

from appliance.kernels.packed_matmul.reference import prepare_linear

__all__ = ["prepare_linear"]
