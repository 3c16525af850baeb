"""An API request's id, time, model and fingerprint, which its answer repeats; its token counts."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

if TYPE_CHECKING:
    from appliance.engine.nouns.request import AdapterRef
    from appliance.server.models.model_state import ModelState
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


class PromptTokensDetails(msgspec.Struct):
    """Prompt tokens by source."""

    cached_tokens: int
    image_tokens: int | UnsetType = UNSET  # rows of pictures


class CompletionTokensDetails(msgspec.Struct):
    """Output tokens by purpose, and drafted ones by outcome."""

    reasoning_tokens: int | UnsetType = UNSET  # in thoughts, if the model can think or call
    # Of speculative decoding, if any.
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    """Token counts of one request; prompts count once for any `n`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
