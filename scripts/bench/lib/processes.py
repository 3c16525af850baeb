"""Tells how much of the machine a benchmark, the server and all others used."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.bench.own_server import ServerProcess

_TICKS = os.sysconf("SC_CLK_TCK")


class Meter:
    """Cores in use by this process, the server and all others since it was made."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._begin = self._now()

    def read(self) -> dict[str, float]:
        """Return cores used by this process (client), the server, others and other machines."""
        used = [now - before for now, before in zip(self._now(), self._begin, strict=True)]
        wall, busy, stolen, client, server = used
        others = max(0.0, busy - client - server)
        shares = {"client": client, "server": server, "others": others, "stolen": stolen}
        return {name: round(seconds / wall, 3) for name, seconds in shares.items()}

    def _now(self) -> tuple[float, ...]:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
        busy = (user + nice + system + irq + softirq) / _TICKS
        server = self._server.cpu_seconds()
        return time.perf_counter(), busy, steal / _TICKS, time.process_time(), server
