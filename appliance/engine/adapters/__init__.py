"""Adapters in the engine: those in slots, the requests that wait for one, and eviction."""
