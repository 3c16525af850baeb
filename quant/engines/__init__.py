"""Other people's quantizers, called where they are installed; nothing here is loaded otherwise."""

from appliance.quant.engines.run import quantize_by_engine

__all__ = ["quantize_by_engine"]
