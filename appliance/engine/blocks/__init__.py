"""KV blocks: who holds them, their content, and its eviction. See block_manager."""
