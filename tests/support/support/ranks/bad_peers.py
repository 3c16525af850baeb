"""Replaces `python -m appliance.engine.ranks` with ranks whose sums fail: `bad_peers.py FAULT ...`.

The sums hang or change data; after "peers" only where NCCL would go from peer to peer.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from appliance.engine.ranks.member import run_member
from appliance.model.shard.joint import Joint

if TYPE_CHECKING:
    from torch import Tensor

_sum = Joint.sum
scope, fault = sys.argv[1].split()


def bad_sum(self: Joint, x: Tensor) -> Tensor:
    x = _sum(self, x)
    if x.numel() > 1:  # the ranks have met
        if fault == "hang":
            time.sleep(600)
        x[0] += 1
    return x


if scope == "all" or "NCCL_P2P_DISABLE" not in os.environ:
    Joint.sum = bad_sum  # type: ignore[method-assign]
sys.exit(run_member(sys.argv[2:]))
