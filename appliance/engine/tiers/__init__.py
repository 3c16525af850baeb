"""Where the content of KV blocks goes when it leaves the cache: host memory, then a disk."""
