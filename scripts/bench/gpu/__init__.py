"""Measure kernels and the engine on a GPU, beside their peers, in one run."""
