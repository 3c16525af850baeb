"""RMS norm, alone or after a residual addition, and rotary position embedding."""

from appliance.kernels.norm_rope.reference import add_rms_norm, rms_norm, rotary

__all__ = ["add_rms_norm", "rms_norm", "rotary"]
