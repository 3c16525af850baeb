"""Moves whole blocks of all layers: copy-on-write, and to host memory and back."""
