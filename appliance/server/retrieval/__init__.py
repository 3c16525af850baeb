"""Routes that read texts without generating: vectors, relevance, tokens."""
