"""Beam search: the search itself, and its beams as a sequence group."""
