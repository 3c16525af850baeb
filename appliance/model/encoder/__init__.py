"""Encoders, whose tokens look at all of a text: they embed and rank texts and generate nothing."""
