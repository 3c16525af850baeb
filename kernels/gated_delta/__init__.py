"""The gated delta rule: linear attention whose state decays and is corrected by each row."""

from appliance.kernels.gated_delta.reference import gated_delta

__all__ = ["gated_delta"]
