"""Attention of many rows of a sequence: tiles of them, each with all its keys."""
