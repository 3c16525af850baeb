"""Ports of this machine for servers that cannot choose their own."""

from __future__ import annotations

import random
import socket

# Excludes the ports that the system assigns and those of Ray's workers, which would be given away
# before a server takes them.
_CANDIDATES = random.SystemRandom().sample(range(20_000, 32_000), 12_000)


def free_port() -> int:
    """Find a port that is free now; each call returns another one."""
    while True:
        port = _CANDIDATES.pop()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
