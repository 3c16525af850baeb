"""Attention of ragged rows over keys and values that lie in blocks."""
