"""Predicts what a token costs a divided model, and chooses the ranks' shares by it."""
