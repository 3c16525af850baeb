"""A server whose wall clock jumps by years, by libfaketime; monotonic clocks are unaffected."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from support.server.soak.server import Server
from support.server.soak.streams import streams

LIBRARY = Path(__file__).parents[5] / ".cache/tools/libfaketime.so.1"
JUMPS = ("+1d", "-1d", "+10y", "-10y", "+0")


def environment(offset: Path) -> dict[str, str]:
    """Variables that make a process read its clock's offset from a file.

    Args:
        offset: the file, which must exist.
    """
    offset.write_text("+0")
    return {
        "LD_PRELOAD": str(LIBRARY),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        # Disables libfaketime's workaround for an old glibc, with which Python would spin wherever
        # a thread waits.
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
    }


async def clock_jumps(
    server: Server, offset: Path, *, clients: int, seconds: float
) -> dict[str, Any]:
    """Stream to clients while the server's clock jumps forwards and backwards.

    Args:
        server: started with `environment`.
        offset: the file that was named there.
        clients: at once.
        seconds: in all.

    Raises:
        SoakError: as for `streams`.
    """

    async def jump() -> None:
        for jump in JUMPS:
            await asyncio.sleep(seconds / (len(JUMPS) + 1))
            await asyncio.to_thread(offset.write_text, jump)

    jumping = asyncio.create_task(jump())
    found = await streams(server, clients=clients, seconds=seconds)
    await jumping
    return {**found, "jumps": len(JUMPS)}
