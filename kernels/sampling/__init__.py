"""Chooses token ids from logits, one independent row per sequence."""
