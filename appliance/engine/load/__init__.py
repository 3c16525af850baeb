"""Turns settings into a loaded engine: execution, memory, weights, runner, cache."""
