"""Capping of logits: cap * tanh(logits / cap)."""
