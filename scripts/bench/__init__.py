"""Benchmarks, a module each, in rooms by what they measure; `scripts/benchmark` starts them."""
