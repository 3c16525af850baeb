"""Suites for the benchmark's supervisor that do what no suite should."""
