"""Chooses codes and scales (rounding, GPTQ, AWQ, FP8) and the bits of each linear."""
