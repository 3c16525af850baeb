"""Memory shared by both processes: a 64-bit word per block, and the beacon.

The API process creates it before the number of blocks is known, with room for many more: untouched
pages cost nothing. Its size is sealed, so no access can fault.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from appliance.engine.nouns.beacon import WORDS, Beacon

MAX_BLOCKS = 2**23
WORD_BYTES = 8
_BYTES = (MAX_BLOCKS + WORDS) * WORD_BYTES
# From linux/fcntl.h; fcntl of Python 3.11 lacks some of them.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4


def create_metadata() -> int:
    """Create a zeroed memory file; return its descriptor."""
    descriptor = os.memfd_create("appliance-block-metadata", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, _BYTES)
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW)
    return descriptor


def map_metadata(descriptor: int, *, writable: bool) -> memoryview:
    """Map the file's words and close the descriptor; the mapping lives as long as the view."""
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    mapping = mmap.mmap(descriptor, _BYTES, access=access)
    os.close(descriptor)
    return memoryview(mapping).cast("Q")


def beacon_of(words: memoryview) -> Beacon:
    return Beacon(words[MAX_BLOCKS:])
