"""How codes and scales are chosen: rounding, GPTQ, AWQ, FP8, and how many bits each linear gets."""
