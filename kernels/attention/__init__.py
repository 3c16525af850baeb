"""Attention of ragged rows over keys and values in blocks."""
