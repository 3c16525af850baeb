"""Measures the KV cache's precision per layer and chooses it within a budget."""
