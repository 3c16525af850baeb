"""Trims and freezes the process's memory once everything is loaded."""

from __future__ import annotations

import gc

from appliance.runtime import release_unused


def settle() -> None:
    """Free temporary memory of the start, and exempt the rest from garbage collection.

    Building the tokenizer leaves free lists: 7 MiB for a vocabulary of 49 thousand, 38 MiB for one
    of 262 thousand. A full collection stalls all streams for 15 ms and finds nothing in loaded
    objects.
    """
    gc.collect()
    gc.freeze()
    release_unused()
