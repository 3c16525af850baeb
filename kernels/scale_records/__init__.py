"""Scales of GGML's types from records of integers and halves."""
