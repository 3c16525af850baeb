"""Links between ranks that torch executes, tested by sums like those of a step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from appliance.engine.ranks.links.link import LinkTimeoutError
from appliance.engine.ranks.links.trial import new_seed, try_link

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from appliance.engine.ranks.links.link import LinkPath, LinkTrial
    from appliance.model.shard.joint import Joint


class JointLink:
    """Rank 0's end of the way to another rank; all ranks take part in each sum.

    Args:
        joint: connected; its operations time out after about the test's limit.
        path: of its sums.
        other: the rank that sends back.
    """

    def __init__(self, joint: Joint, path: LinkPath, other: int) -> None:
        self.path = path
        self._joint, self._other = joint, other

    def echo(self, data: NDArray[Any], rounds: int, limit: float) -> tuple[NDArray[Any], float]:
        """Send data there and back; see `Link`.

        A GPU's sum that never ends is for another process to notice.

        Raises:
            LinkTimeoutError: it took longer than the limit.
            RuntimeError: another rank has ended, or the devices cannot reach each other.
        """
        begin = time.perf_counter()
        try:
            _announce(self._joint, self._other, data.size, rounds)
            values = torch.from_numpy(data.copy()).to(self._joint.device)
            begin = time.perf_counter()
            for _ in range(rounds):
                values = self._joint.sum(values)
                values = self._joint.sum(values.zero_())
            back = values.cpu().numpy()
        except RuntimeError as error:
            if time.perf_counter() - begin < limit:
                raise
            raise LinkTimeoutError from error
        seconds = time.perf_counter() - begin
        if seconds > limit:
            raise LinkTimeoutError
        return back, seconds


def try_joint(joint: Joint, path: LinkPath, limit: float) -> tuple[LinkTrial, ...]:
    """Test the links to the other ranks; stop at the first unsound one.

    Args:
        limit: seconds for each.

    Raises:
        RuntimeError: another rank has ended, or the devices cannot reach each other.
    """
    trials = []
    for other in range(1, joint.size):
        trials.append(try_link(JointLink(joint, path, other), new_seed(), limit))
        if trials[-1].problem:
            return tuple(trials)
    _announce(joint, 0, 0, 0)
    return tuple(trials)


def send_back(joint: Joint) -> None:
    """Be another rank while rank 0 runs `try_joint`.

    Raises:
        RuntimeError: rank 0 has ended or does not go on.
    """
    while True:
        order = torch.zeros(3, dtype=torch.int64, device=joint.device)
        joint.broadcast(order)
        other, count, rounds = order.tolist()
        if not rounds:
            return
        values = torch.zeros(count, device=joint.device)
        for _ in range(rounds):
            values = joint.sum(values.zero_())
            if joint.rank != other:
                values.zero_()
            values = joint.sum(values)


def _announce(joint: Joint, other: int, count: int, rounds: int) -> None:
    joint.broadcast(torch.tensor([other, count, rounds], device=joint.device))
