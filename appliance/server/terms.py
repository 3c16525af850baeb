"""On what terms a request is served: whose it is, how urgent, how long, whose cache it reads."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.request import MAX_PRIORITY, Request
from appliance.errors import RequestError

if TYPE_CHECKING:
    from appliance.engine.request import SamplingParams
    from appliance.server.schema import SamplingFields
    from appliance.server.state import ServerState


@dataclass(frozen=True, slots=True)
class Terms:
    """What the engine is told of a request beside prompt and sampling."""

    owner: str
    priority: int
    timeout: float | None
    max_queue_seconds: float | None
    cache_salt: str

    @classmethod
    def of(cls, body: SamplingFields, state: ServerState, owner: str) -> Terms:
        """From a body and the name of the key that it came with.

        Raises:
            RequestError: a priority that this server does not give.
        """
        own = state.use.limits_of(owner).priority
        priority = own if body.priority is None else body.priority
        # Where several share the server, one can stand back but not push in front of the others.
        lowest = own if state.several_keys else -MAX_PRIORITY
        if not lowest <= priority <= MAX_PRIORITY:
            why = " where several keys share the server" if state.several_keys else ""
            raise RequestError(
                f"priority must be between {lowest} and {MAX_PRIORITY}{why}, got {priority}; "
                "lower is served earlier",
                param="priority",
            )
        return cls(
            owner=owner,
            priority=priority,
            timeout=body.timeout,
            max_queue_seconds=state.config.max_queue_seconds,
            cache_salt=salt_of(state, body, owner),
        )

    def request(self, request_id: str, prompt: list[int], sampling: SamplingParams) -> Request:
        """A request for the engine.

        Raises:
            RequestError: a timeout that is out of range.
        """
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            priority=self.priority,
            timeout=self.timeout,
            max_queue_seconds=self.max_queue_seconds,
            cache_salt=self.cache_salt,
            owner=self.owner,
        )


def salt_of(state: ServerState, body: SamplingFields, owner: str) -> str:
    """What keeps apart what this request's prompt leaves in caches; see `prefix_salt`."""
    apart = state.several_keys and not state.config.share_prefixes_between_keys
    return prefix_salt(owner if apart else "", body.cache_salt or "")


def prefix_salt(owner: str, asked: str) -> str:
    """What keeps cached prefixes apart: equal only for the same owner and the same wish.

    It is a digest, so that what clients chose as a secret goes no further than this process; the
    same in every process, so that a cache on disk is found again.

    Args:
        owner: name of the key; empty shares with all others.
        asked: `cache_salt` of the body; empty for none.
    """
    if not owner and not asked:
        return ""
    return hashlib.sha256(json.dumps([owner, asked]).encode()).hexdigest()
