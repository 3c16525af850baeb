"""A terminal chat with a running server's model, or with one in this process."""
