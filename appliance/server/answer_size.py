"""The limit on answers that are not streamed: they are in memory as a whole, and as JSON.

Prompts, choices, tokens and log probabilities multiply, and so do vectors and their dimensions:
each within its own bound, they would make hundreds of megabytes. A stream has no such bound; it is
sent as it comes.
"""

from __future__ import annotations

from appliance.errors import RequestError

MAX_TOKENS = 2**20
MAX_LOGPROBS = 2**19  # some 50 MB of JSON
# An answer with more log probabilities is put together in a thread: that takes the time of some
# hundred steps of the engine.
OFF_LOOP_LOGPROBS = 2**12
MAX_VECTOR_BYTES = 2**26
# One number as text, and as a part of base64.
FLOAT_BYTES, BASE64_BYTES = 16.0, 16 / 3


def most_tokens(prompts: int, choices: int, logprobs: int | None) -> int:
    """Tokens that each choice may have.

    Args:
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


def check_scores(prompts: int, choices: int, tokens: int, logprobs: int) -> None:
    """Refuse scores of prompts that would be too large an answer.

    Args:
        prompts: of the request.
        choices: for each of them, which all get the scores.
        tokens: of the longest prompt.
        logprobs: alternatives reported for each token.

    Raises:
        RequestError: it names the numbers.
    """
    total = prompts * choices * tokens * (1 + logprobs)
    if total > MAX_LOGPROBS:
        raise RequestError(
            f"{prompts} x {choices} x {tokens} tokens (prompts, choices and length) with "
            f"{1 + logprobs} log probabilities each are {total}, and an answer holds at most "
            f"{MAX_LOGPROBS}; ask for fewer alternatives or send fewer prompts",
            param="prompt_logprobs",
        )


def check_vectors(vectors: int, dimensions: int, bytes_per_value: float, *, param: str) -> None:
    """Refuse vectors that would be too large an answer.

    Args:
        vectors: their number.
        dimensions: of each.
        bytes_per_value: in the answer; 0 where only their comparison is told.
        param: the field to blame.

    Raises:
        RequestError: it names the numbers.
    """
    each = dimensions * max(4.0, bytes_per_value)
    most = int(MAX_VECTOR_BYTES // each)
    if vectors > most:
        raise RequestError(
            f"{vectors} vectors of {dimensions} numbers are {vectors * each / 2**20:.0f} MiB, and "
            f"an answer holds at most {MAX_VECTOR_BYTES >> 20}; send at most {most} texts at once, "
            "or ask for base64 or fewer dimensions",
            param=param,
        )
