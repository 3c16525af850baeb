"""Activations of an MLP, alone or as gates, and gates of heads."""
