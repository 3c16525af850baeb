"""Measure the dashboard in a pseudo-terminal."""
