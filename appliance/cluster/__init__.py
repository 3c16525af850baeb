"""Serves a model on several machines through Ray Serve; each replica is a single-box server."""
