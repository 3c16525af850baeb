"""Beam search: which beams grow, and the sequences they are."""
