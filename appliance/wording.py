"""Formats counts, sizes and ages. Imports nothing of ours."""

from __future__ import annotations


def counted(count: int, thing: str) -> str:
    """Format a count, such as "1 block" and "1,024 blocks"."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def as_size(count: int) -> str:
    """Format bytes, such as "12.5 MiB" and "3.20 GiB"."""
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.1f} MiB"


def age_in_words(seconds: float) -> str:
    """Format an age in its largest whole unit, such as "3d ago"."""
    for unit, one in (("w", 604800), ("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= one:
            return f"{seconds / one:.0f}{unit} ago"
    return "now"
