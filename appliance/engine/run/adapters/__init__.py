"""Adapters in the engine: slots, eviction, and requests that wait for one."""
