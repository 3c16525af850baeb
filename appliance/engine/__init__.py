"""Schedules and runs requests: queue, KV blocks, steps, and the process that holds them."""
