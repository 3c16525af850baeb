"""The gated delta rule: linear attention whose state forgets, and corrects what it holds."""

from appliance.kernels.gated_delta.reference import gated_delta

__all__ = ["gated_delta"]
