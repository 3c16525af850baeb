"""Starts kernels while the one before them still ends, on GPUs that can."""
