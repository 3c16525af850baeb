"""The precision of the KV cache: measured layer by layer, chosen under a budget."""
