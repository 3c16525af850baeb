"""Stores quantized and plain weights: schemes, packing, and one file per folder format.

This is the lower floor of `quant`: models import it, so it imports neither models nor the rest.
"""

from appliance.quant.formats.reader import WeightReader, is_read, open_weights

__all__ = ["WeightReader", "is_read", "open_weights"]
