"""KV blocks: who holds them, what they contain, where their content goes. See block_manager."""
