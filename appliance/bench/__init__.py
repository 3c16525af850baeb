"""Loads an endpoint as clients do, and reports its speed with machine and versions."""
