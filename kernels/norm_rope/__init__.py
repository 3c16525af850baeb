"""Norms, alone or of a sum with the stream, and rotary position embedding."""
