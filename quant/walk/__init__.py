"""Runs calibration rows through a model with one layer in memory at a time."""
