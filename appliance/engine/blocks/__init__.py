"""KV blocks: their holders, their content, and its eviction. See block_manager."""
