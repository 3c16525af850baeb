"""Sealing: quantizes a full block's 8-bit pages to 4 bits, keys by channel."""
