"""Formats numbers for the dashboard: short, without insignificant digits."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def count(number: int) -> str:
    """Format a whole number with thousands separators, from a million on in M or G."""
    if abs(number) < 1_000_000:
        return f"{number:,}"
    if abs(number) < 1_000_000_000:
        return f"{number / 1e6:,.2f} M"
    return f"{number / 1e9:,.2f} G"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun in singular or plural."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def rate(per_second: float) -> str:
    """Format a rate without its unit."""
    return f"{per_second:,.1f}" if per_second < 1000 else f"{per_second:,.0f}"


def percent(share: float) -> str:
    """Format a share of one in percent."""
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Format a latency with three digits and a unit."""
    if seconds < 0.00995:
        return f"{1e3 * seconds:.2f} ms"
    if seconds < 0.0995:
        return f"{1e3 * seconds:.1f} ms"
    if seconds < 0.9995:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    return clock(seconds)


def clock(seconds: float) -> str:
    """Format an age: tenths of a second below a minute, then m:ss, h:mm:ss, days."""
    if seconds < 59.95:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def size(num_bytes: int) -> str:
    """Format bytes in the largest unit that gives at least 1."""
    amount = float(num_bytes)
    for unit in _BYTE_UNITS[:-1]:
        if amount < 1000:
            return (
                f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
            )
        amount /= 1024
    return f"{amount:.1f} {_BYTE_UNITS[-1]}"
