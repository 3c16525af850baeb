"""The KV cache in memory: its formats, one layer, all layers, and sealed blocks."""
