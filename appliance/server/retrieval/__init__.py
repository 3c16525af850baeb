"""Routes that read texts and generate nothing: vectors, relevance, tokens."""
