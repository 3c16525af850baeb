"""Writes a step's keys and values into their cache slots, quantized if the format requires it."""

from appliance.kernels.kv_write.reference import write_kv

__all__ = ["write_kv"]
