"""Packed codes of weights as the GPU holds them: their order in memory, and how they widen."""
