"""Drawing a token by rank without a sort: what `sampling` does once it has a list of logits."""
