"""Limits the size of unstreamed answers, which memory holds whole, and again as JSON.

Prompts, choices, tokens and log probabilities multiply, as do vectors and dimensions: each within
its own limit, they can still make hundreds of megabytes. A stream has no such limit.
"""

from __future__ import annotations

from appliance.errors import RequestError

MAX_TOKENS = 2**20
MAX_LOGPROBS = 2**19  # about 50 MB of JSON
# Encode an answer with more log probabilities in a thread: it takes as long as about a hundred
# engine steps.
OFF_LOOP_LOGPROBS = 2**12
MAX_VECTOR_BYTES = 2**26
# Bytes of one number as text, and within base64.
FLOAT_BYTES, BASE64_BYTES = 16.0, 16 / 3


def most_tokens(prompts: int, choices: int, logprobs: int | None) -> int:
    """Return the maximum number of tokens per choice.

    Args:
        logprobs: alternatives per token; None reports nothing.
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
        tokens: maximum per choice.
        logprobs: alternatives per token; None reports nothing.

    Raises:
        RequestError: it is too large; the message has the numbers.
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
    """Refuse prompt scores that would make too large an answer.

    Args:
        choices: number per prompt; each repeats the scores.
        tokens: length of the longest prompt.
        logprobs: alternatives per token.

    Raises:
        RequestError: it is too large; the message has the numbers.
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
    """Refuse vectors that would make too large an answer.

    Args:
        bytes_per_value: in the answer; 0 if it has only similarities.

    Raises:
        RequestError: it is too large; the message has the numbers.
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
