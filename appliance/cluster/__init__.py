"""Serves a model on several machines through Ray Serve, each replica with the server of one box."""
