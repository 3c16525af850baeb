"""Widens weights that the CPU library holds as tiles of 16 outputs, on any device."""
