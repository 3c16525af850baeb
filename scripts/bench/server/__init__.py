"""A server over HTTP, ours or a peer's."""
