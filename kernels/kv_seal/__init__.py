"""Sealing: a full block leaves its 8-bit pages for pages of 4 bits, keys quantized by channel."""
