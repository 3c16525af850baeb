"""Measures a checkpoint against its base and shows the result on a card."""
