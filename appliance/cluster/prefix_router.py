"""Ray Serve's request router, with the policy of a single box.

Ray makes one per front and tells it the replicas and their statistics
(https://docs.ray.io/en/latest/serve/advanced-guides/custom-request-router.html).
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from appliance.cluster.front import ReplicaRequest
from appliance.engine.process.router import ReplicaLoad, ReplicaRouter

URL, BLOCKS = "url", "blocks"  # keys of a replica's statistics
ASKED = "asked"  # keyword argument of a call that needs a replica


class PrefixRouter(RequestRouter):
    """Chooses the replica with the longest known prefix, within a bound on load."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._policy = ReplicaRouter[str]()
        self._known: dict[str, int] = {}  # number of blocks by replica, as the policy knows it

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return one replica, or none until a replica has reported its address.

        Tried ones come again after all were tried.
        """
        if pending_request is None or not isinstance(
            asked := pending_request.kwargs.get(ASKED), ReplicaRequest
        ):
            return [candidate_replicas]
        ready = {one.replica_id.unique_id: one for one in candidate_replicas if _is_ready(one)}
        self._tell_policy(ready)
        if not ready:
            # Otherwise Ray asks again at once, and never lets its loop hear of a replica.
            pending_request.routing_context.should_backoff = True
            return []
        untried = ready.keys() - asked.tried
        if not untried:
            return [[next(iter(ready.values()))]]
        loads = {name: ReplicaLoad(asked.num_open[name]) for name in ready if name in untried}
        return [[ready[self._policy.route(asked.hashes, loads)]]]

    def _tell_policy(self, ready: dict[str, RunningReplica]) -> None:
        for name in self._known.keys() - ready.keys():
            self._policy.end(name)
            del self._known[name]
        for name, replica in ready.items():
            blocks = replica.routing_stats[BLOCKS]
            if self._known.get(name) != blocks:
                self._known[name] = blocks
                self._policy.begin(name, blocks)


def _is_ready(replica: RunningReplica) -> bool:
    return URL in replica.routing_stats
