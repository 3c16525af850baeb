"""Tiers below the KV cache for evicted blocks: host memory, then disk."""
