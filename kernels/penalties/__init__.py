"""Lowers the logits of tokens already seen, by each sequence's own counts."""
