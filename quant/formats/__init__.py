"""How quantized and plain weights lie in safetensors folders, one file per format."""

from appliance.quant.formats.reader import WeightReader, is_read, open_weights

__all__ = ["WeightReader", "is_read", "open_weights"]
