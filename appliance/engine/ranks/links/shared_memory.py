"""The memory that two ranks on a CPU share, as a link, with both ends. Imports no torch.

Data pass as in a step: by sums in which all ranks but one add zeros.
"""

from __future__ import annotations

import time
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.engine.ranks.links.link import LinkPath, LinkTimeoutError
from appliance.kernels import arrays
from appliance.kernels.cpu.engine import RankLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from appliance.kernels.cpu.group import NativeGroup


class SharedMemoryLink:
    """The end that starts a test.

    Args:
        group: of this rank and the other.
        begin: tells the other to run `send_back` with a count and rounds.
        give_up: ends the other process, in case this one waits for it.
    """

    path = LinkPath.SHARED

    def __init__(
        self,
        group: NativeGroup,
        begin: Callable[[int, int], None],
        give_up: Callable[[], None],
    ) -> None:
        self._group, self._begin, self._give_up = group, begin, give_up

    def echo(self, data: NDArray[Any], rounds: int, limit: float) -> tuple[NDArray[Any], float]:
        """Send data there and back; see `Link`.

        Raises:
            LinkTimeoutError: it takes longer than the limit; ends the other process.
            RankLostError: the other process has ended by itself.
        """
        values = arrays.of_numpy(data.copy())
        found: list[float] = []
        lost: list[RankLostError] = []

        def run() -> None:
            try:
                found.append(_send(self._group, values, rounds))
            except RankLostError as error:
                lost.append(error)

        self._begin(data.size, rounds)
        thread = Thread(target=run, name="link", daemon=True)
        thread.start()
        thread.join(limit)
        if thread.is_alive():
            self._give_up()
            thread.join()
            raise LinkTimeoutError
        if lost:
            raise lost[0]
        return values, found[0]


def _send(group: NativeGroup, values: Any, rounds: int) -> float:
    group.meet()
    begin = time.perf_counter()
    for _ in range(rounds):
        group.sum(values)
        values[:] = 0
        group.sum(values)
    return time.perf_counter() - begin


def send_back(group: NativeGroup, count: int, rounds: int) -> None:
    """Serve as the other end: receive numbers and send them back, `rounds` times.

    Raises:
        RankLostError: the rank that began has ended.
    """
    values = arrays.of_numpy(np.zeros(count, np.float32))
    group.meet()
    for _ in range(rounds):
        values[:] = 0
        group.sum(values)
        group.sum(values)
