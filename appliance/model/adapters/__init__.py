"""Adapters: low-rank changes of a model's linears, read from files and ordered for executors."""
