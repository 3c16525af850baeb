"""Schedules and runs requests: queue, KV blocks, steps, and the engine process."""
