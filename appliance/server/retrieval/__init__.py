"""Texts that are read and not continued: vectors, relevance, tokens."""
