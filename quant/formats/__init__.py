"""How quantized and plain weights are stored: schemes, packing, and one file per format of folder.

The lower floor of `quant`: models read it, so it knows neither models nor what else quantizes.
"""

from appliance.quant.formats.reader import WeightReader, is_read, open_weights

__all__ = ["WeightReader", "is_read", "open_weights"]
