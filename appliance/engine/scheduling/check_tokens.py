"""Checks a request against the model's vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.scheduling.beams.beam_search import num_candidates
from appliance.errors import RequestError

if TYPE_CHECKING:
    from appliance.engine.nouns.messages import EngineInfo
    from appliance.engine.nouns.request import Request


def check_tokens(request: Request, info: EngineInfo) -> None:
    """Refuse a request with tokens outside the model's vocabulary.

    Raises:
        RequestError: a token id is too large, or the vocabulary is too small for so many beams.
    """
    prompt, sampling = request.prompt_token_ids, request.sampling
    budget = sampling.thought_budget
    ends = (min(prompt, default=0), max(prompt, default=0))
    for param, token_ids in (
        ("prompt", ends),
        ("labels", request.labels),
        ("thinking_token_budget", () if budget is None else (*budget.opening, *budget.closing)),
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        for token_id in token_ids:
            if not 0 <= token_id < info.vocab_size:
                raise RequestError(
                    f"token id {token_id} is outside the vocabulary of {info.vocab_size}",
                    param=param,
                )
    needed = num_candidates(sampling, info.eos_token_ids)
    if sampling.use_beam_search and needed > info.vocab_size:
        raise RequestError(
            f"so many beams and stop tokens need a vocabulary of {needed} tokens, and this "
            f"model has {info.vocab_size}; ask for fewer beams",
            param="best_of",
        )
