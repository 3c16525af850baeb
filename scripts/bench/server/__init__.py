"""Measure a server over HTTP, ours or a peer's."""
