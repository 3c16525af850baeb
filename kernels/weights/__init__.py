"""The forms of a linear's weight: integer codes, 4-bit and 8-bit floats, and GGML's blocks."""
