"""A page: the keys and values of 32 tokens and one KV head, as the GPU kernels hold them."""
