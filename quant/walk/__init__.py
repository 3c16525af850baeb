"""Calibration rows on their way through a model, one layer in memory at a time."""
