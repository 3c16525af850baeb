"""Text from token ids, as server and LLM share it."""
