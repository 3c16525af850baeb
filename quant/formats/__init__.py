"""Storage of quantized and plain weights: schemes, packing, and a file per folder format.

Models import this folder, so it imports neither models nor the rest of `quant`.
"""

from appliance.quant.formats.reader import WeightReader, is_read, open_weights

__all__ = ["WeightReader", "is_read", "open_weights"]
