"""Predicts a token's time on a divided model, and chooses the ranks' shares by it."""
