"""The terms of a request: owner, priority, deadline, cache salt."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.nouns.request import MAX_PRIORITY, Request
from appliance.errors import RequestError

if TYPE_CHECKING:
    from appliance.engine.nouns.picture import PromptPictures
    from appliance.engine.nouns.request import AdapterRef, Pooling
    from appliance.engine.nouns.sampling_params import SamplingParams
    from appliance.server.models.model_state import ModelState
    from appliance.server.requests.schema import TermsFields


@dataclass(frozen=True, slots=True)
class Terms:
    """A request's terms: everything but prompt and sampling."""

    owner: str
    priority: int
    timeout: float | None
    max_queue_seconds: float | None
    cache_salt: str
    adapter: AdapterRef | None

    @classmethod
    def of(cls, body: TermsFields, state: ModelState, owner: str) -> Terms:
        """Read a body's terms.

        Raises:
            RequestError: the priority is not allowed.
            UnknownModelError: the server no longer serves the model or adapter.
        """
        own = state.use.limits_of(owner).priority
        priority = own if body.priority is None else body.priority
        # On a shared server a key can yield, but not overtake others.
        lowest = own if state.several_keys else -MAX_PRIORITY
        if not lowest <= priority <= MAX_PRIORITY:
            why = " where several keys share the server" if state.several_keys else ""
            raise RequestError(
                f"priority must be between {lowest} and {MAX_PRIORITY}{why}, got {priority}; "
                "lower is served earlier",
                param="priority",
            )
        state.check_model(body.model)
        return cls(
            owner=owner,
            priority=priority,
            timeout=body.timeout,
            max_queue_seconds=state.config.max_queue_seconds,
            cache_salt=salt_of(state, body, owner),
            adapter=state.adapters.find(body.model),
        )

    def request(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        pooling: Pooling | None = None,
        labels: tuple[int, ...] = (),
        pictures: PromptPictures | None = None,
    ) -> Request:
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            priority=self.priority,
            timeout=self.timeout,
            max_queue_seconds=self.max_queue_seconds,
            cache_salt=self.cache_salt,
            owner=self.owner,
            adapter=self.adapter,
            pooling=pooling,
            labels=labels,
            pictures=pictures,
        )


def salt_of(state: ModelState, body: TermsFields, owner: str) -> str:
    """Return the salt of a request's cached prefixes; see `prefix_salt`."""
    apart = state.several_keys and not state.config.share_prefixes_between_keys
    return prefix_salt(owner if apart else "", body.cache_salt or "")


def prefix_salt(owner: str, asked: str) -> str:
    """Return a salt that two requests share only if owner and `cache_salt` agree.

    A digest keeps a client's secret in this process; it is the same in every process, so that a
    cache on disk stays usable.

    Args:
        owner: name of the API key; empty shares with all.
        asked: the body's `cache_salt`, or empty.
    """
    if not owner and not asked:
        return ""
    return hashlib.sha256(json.dumps([owner, asked]).encode()).hexdigest()
