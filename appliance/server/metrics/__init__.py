"""Prometheus metrics, and what they are read from."""
