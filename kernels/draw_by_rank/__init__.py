"""Draws a token by rank from a list of logits, without a sort."""
