"""Measure quality and cost of quantized weights and KV caches."""
