"""Multiplies each token by the weights of its experts: tokens sorted by expert, one launch."""
