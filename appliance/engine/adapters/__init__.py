"""Adapters in the engine: which are loaded, who waits for one, which may make room."""
