"""The selective scan of Mamba-2: a state of each head that decays and takes values up by keys."""

from appliance.kernels.selective_scan.reference import selective_scan

__all__ = ["selective_scan"]
