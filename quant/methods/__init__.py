"""Methods that choose codes, scales and bits of weights: rounding, GPTQ, AWQ, FP8."""
