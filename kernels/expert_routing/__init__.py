"""Chooses the experts of each token from a router's logits."""
