"""Adapters: low-rank changes of a model's linears, read from files and brought into order."""
