"""Quality and cost of quantized weights and KV caches."""
