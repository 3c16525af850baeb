"""Shared by the benchmarks: conditions of a run, load, prompts, processes, made-up models."""
