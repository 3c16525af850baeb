"""Packed codes of weights on the GPU: their order in memory, and how they widen."""
