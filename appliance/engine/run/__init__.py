"""Runs plans, on a GPU one step ahead of its answers. See device_runner."""
