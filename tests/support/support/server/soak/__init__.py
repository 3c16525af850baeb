"""Faults and load for a running server, short in tests and long by scripts/soak."""
