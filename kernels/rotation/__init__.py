"""Rotation of a linear's inputs, in blocks of 64."""
