"""The benchmarks, in rooms by what they measure; `scripts/benchmark` starts them."""
