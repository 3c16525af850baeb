"""A page: the keys and values of 32 tokens of one KV head, as the GPU kernels store them."""
