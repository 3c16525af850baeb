"""Multiplies activations that are rounded to 8 bits by weights of 4 bits, for prompts."""
