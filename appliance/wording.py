"""Formats words that depend on a number. Imports nothing of ours."""

from __future__ import annotations


def counted(count: int, thing: str) -> str:
    """Format a count, such as "1 block" and "1,024 blocks"."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
