"""How quantized and plain weights lie in safetensors folders, one file per format."""

from appliance.quant.formats.reader import WeightReader, open_weights

__all__ = ["WeightReader", "open_weights"]
