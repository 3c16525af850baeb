"""Merges what spans of keys leave of one row's attention."""
