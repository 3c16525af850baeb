"""Sets the logits of banned tokens to -inf."""
