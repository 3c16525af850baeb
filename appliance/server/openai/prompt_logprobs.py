"""`prompt_logprobs` in vLLM's shape: log probabilities of a prompt's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from appliance.server.openai.answers import PromptLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.nouns.messages import TokenLogprobs
    from appliance.server.openai.answers import PromptLogprobs
    from appliance.server.requests.answer import Answer
    from appliance.tokenizer import Tokenizer


def prompt_logprobs(
    answer: Answer, number: int, tokenizer: Tokenizer
) -> PromptLogprobs | UnsetType:
    """Return one prompt's scores; UNSET if not requested."""
    if not answer.scores_prompts:
        return UNSET
    return [None, *(_place(one, tokenizer) for one in answer.prompt_logprobs[number])]


def _place(scored: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, PromptLogprob]:
    chosen = scored.chosen
    found = {chosen.token_id: (chosen.logprob, None)}
    ranks: Sequence[tuple[int, tuple[float, int | None]]] = [
        (one.token_id, (one.logprob, rank)) for rank, one in enumerate(scored.top, 1)
    ]
    return {
        str(token_id): PromptLogprob(
            logprob=logprob, rank=rank, decoded_token=tokenizer.token_text(token_id)
        )
        for token_id, (logprob, rank) in {**found, **dict(ranks)}.items()
    }
