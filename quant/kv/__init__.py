"""Measures the KV cache's precision per layer and chooses formats within a budget."""
