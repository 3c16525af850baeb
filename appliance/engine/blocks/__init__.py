"""KV blocks: holders, content and eviction. See block_manager."""
