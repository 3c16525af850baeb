"""Other projects' quantizers, imported only on request."""

from appliance.quant.engines.run import quantize_by_engine

__all__ = ["quantize_by_engine"]
