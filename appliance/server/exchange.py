"""Fields that every part of an answer repeats: id, time, model, fingerprint."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.nouns.request import AdapterRef
    from appliance.server.model_state import ModelState
    from appliance.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Exchange:
    """One API request and its answer."""

    id: str
    created: int  # Unix seconds
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    logprobs: bool  # if requested

    @classmethod
    def begin(
        cls, state: ModelState, prefix: str, adapter: AdapterRef | None, *, logprobs: bool
    ) -> Exchange:
        info, tokenizer = state.serving()
        return cls(
            id=f"{prefix}{secrets.token_hex(12)}",
            created=int(time.time()),
            model=state.model_id if adapter is None else adapter.name,
            fingerprint=info.fingerprint,
            tokenizer=tokenizer,
            logprobs=logprobs,
        )
