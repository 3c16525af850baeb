"""Loads an endpoint as clients do, and reports its speed, machine and versions."""
