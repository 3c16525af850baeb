"""How much one answer may hold that is not streamed: all of it is in memory at once, and as JSON.

Prompts, choices, tokens and log probabilities multiply: each within its own bound, they would make
hundreds of megabytes. A stream has no such bound; it is sent as it comes.
"""

from __future__ import annotations

from appliance.errors import RequestError

MAX_TOKENS = 2**20
MAX_LOGPROBS = 2**19  # some 50 MB of JSON
# An answer with more log probabilities is put together in a thread: that takes the time of some
# hundred steps of the engine.
OFF_LOOP_LOGPROBS = 2**12


def most_tokens(prompts: int, choices: int, logprobs: int | None) -> int:
    """Tokens that each choice may have.

    Args:
        prompts: of the request.
        choices: for each of them.
        logprobs: alternatives reported for each token; None reports nothing.
    """
    answers = prompts * choices
    most = MAX_TOKENS // answers
    if logprobs is not None:
        most = min(most, MAX_LOGPROBS // (answers * (1 + logprobs)))
    return max(1, most)


def check_answer(
    prompts: int, choices: int, tokens: int, logprobs: int | None, *, param: str
) -> None:
    """Refuse an answer that would be too large.

    Args:
        prompts: of the request.
        choices: for each of them.
        tokens: of each choice, at most.
        logprobs: alternatives reported for each token; None reports nothing.
        param: the field to blame.

    Raises:
        RequestError: it names the numbers.
    """
    most = most_tokens(prompts, choices, logprobs)
    if tokens <= most:
        return
    total = prompts * choices * tokens
    numbers = f"{prompts} x {choices} x {tokens} tokens (prompts, choices and max_tokens)"
    limit = f"{MAX_TOKENS} tokens"
    if logprobs is not None and total <= MAX_TOKENS:
        numbers += f" with {1 + logprobs} log probabilities each"
        total, limit = total * (1 + logprobs), f"{MAX_LOGPROBS} log probabilities"
    raise RequestError(
        f"{numbers} are {total}, and an answer that is not streamed holds at most {limit}; ask for "
        f"at most {most} tokens, or stream the answer",
        param=param,
    )
