"""Merges the partial results of one row's attention over spans of keys."""
