"""Tiers below the KV cache, which keep evicted blocks: host memory, then a disk."""
