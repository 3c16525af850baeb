"""Limits of prompts and answers: which requests are refused, and when a sequence ends.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.engine.request import FinishReason
from appliance.errors import ContextLengthError, RequestError

if TYPE_CHECKING:
    from appliance.engine.request import Request
    from appliance.engine.sequence import Sequence


# Of a prompt that is scored: logits of so many rows are there at once. Each pass reads the whole
# head, so fewer would be slower.
LOGIT_ROWS = 64
# Rows of a step that sample, where more than one of a sequence may: the memory for logits that the
# rows above have anyway.
SAMPLE_ROWS = 40


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of what runs at once.

    With at least as many rows as sequences, every running sequence advances in every step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int  # rows of one step
    context_length: int  # tokens of one sequence, prompt and answer together

    @property
    def sample_rows(self) -> int:
        """Most rows of a step that sample a token, with those of drafts."""
        return max(self.max_num_seqs, SAMPLE_ROWS)

    def __post_init__(self) -> None:
        assert self.max_num_seqs > 0
        assert self.max_num_batched_tokens > 0
        assert self.context_length > 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits that end every answer of an engine.

    Attributes:
        limits: of what runs at once, and of one sequence's length.
        block_size: token slots per block.
        eos_token_ids: tokens that end an answer, unless its request ignores them.
        is_recurrent: the model has a state besides keys and values.
        max_tokens: most tokens of one sequence, prompt and answer together.
    """

    limits: SchedulerLimits
    num_blocks: int
    block_size: int
    eos_token_ids: frozenset[int] = frozenset()
    is_recurrent: bool = False
    max_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        # To sample a token, all tokens before it must be in the cache, but not the token itself.
        most = min(self.limits.context_length, self.num_blocks * self.block_size + 1)
        object.__setattr__(self, "max_tokens", most)


def check_request(request: Request, bounds: Bounds) -> None:
    """Refuse a request that can never be served.

    Raises:
        ContextLengthError: the prompt leaves no room for an answer in the context.
        RequestError: the prompt is empty or as large as the KV cache, or there are not enough
            sequences or blocks for all beams at once.
    """
    num_tokens, sampling = len(request.prompt_token_ids), request.sampling
    check_prompt(
        num_tokens,
        context_length=bounds.limits.context_length,
        cache_tokens=bounds.num_blocks * bounds.block_size,
        generates=request.generates,
    )
    if sampling.use_beam_search:
        check_beams(
            num_tokens,
            sampling.num_sequences,
            max_num_seqs=bounds.limits.max_num_seqs,
            blocks=(bounds.num_blocks, bounds.block_size),
            is_recurrent=bounds.is_recurrent,
        )


def check_prompt(
    num_tokens: int, *, context_length: int, cache_tokens: int, generates: bool = True
) -> None:
    """Refuse a prompt that leaves no room for an answer.

    Args:
        num_tokens: length of the prompt.
        context_length: tokens of one sequence, prompt and answer together.
        cache_tokens: slots of the whole KV cache.
        generates: there is an answer; without one the prompt may fill either.

    Raises:
        ContextLengthError: the prompt fills the context.
        RequestError: the prompt is empty or fills the KV cache.
    """
    limit = num_tokens + generates
    if num_tokens == 0:
        raise RequestError("the prompt is empty; send at least one token", param="prompt")
    if limit > context_length:
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens, the context holds {context_length} for prompt "
            "and answer together; shorten the prompt"
        )
    if limit > cache_tokens:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, the KV cache holds {cache_tokens} for prompt "
            "and answer together; shorten the prompt or give the server more KV cache memory",
            param="prompt",
            code="context_length_exceeded",
        )


def check_beams(
    num_tokens: int,
    width: int,
    *,
    max_num_seqs: int,
    blocks: tuple[int, int],
    is_recurrent: bool = False,
) -> None:
    """Refuse a beam search that can never run.

    Args:
        num_tokens: length of the prompt.
        width: beams.
        max_num_seqs: sequences that run at once.
        blocks: of the KV cache: their number, and the token slots of each.
        is_recurrent: the model has a state besides keys and values.

    Raises:
        RequestError: there are not enough sequences or blocks for all beams at once.
    """
    if width > max_num_seqs:
        raise RequestError(
            f"a beam search of width {width} runs {width} sequences at once, and this engine runs "
            f"at most {max_num_seqs}; ask for fewer beams or raise --max-num-seqs",
            param="best_of",
        )
    num_blocks, block_size = blocks
    most = max_beam_tokens(num_tokens, width, block_size, num_blocks, is_recurrent=is_recurrent)
    if most <= num_tokens:
        shared = num_tokens // block_size * (width if is_recurrent else 1)
        raise RequestError(
            f"{width} beams after a prompt of {num_tokens} tokens need at least {shared + width} "
            f"KV cache blocks of {block_size} tokens, and there are {num_blocks}; ask for fewer "
            "beams, shorten the prompt or give the server more KV cache memory",
            param="best_of",
        )


def max_beam_tokens(
    num_tokens: int, width: int, block_size: int, num_blocks: int, *, is_recurrent: bool = False
) -> int:
    """Return the most tokens, prompt and answer together, that every beam can have at once.

    Beams certainly share the prompt's full blocks, and nothing else. Where the model has a state,
    not even these: after a preemption they can only be shared up to a checkpoint.
    """
    shared = 0 if is_recurrent else num_tokens // block_size
    return (shared + (num_blocks - shared) // width) * block_size + 1


def reason_to_finish(sequence: Sequence, bounds: Bounds) -> FinishReason | None:
    """Return why a sequence's last token ends it, or None."""
    sampling = sequence.request.sampling
    token_id = sequence.token_ids[-1]
    ends = token_id in sampling.stop_token_ids or (
        token_id in bounds.eos_token_ids and not sampling.ignore_eos
    )
    # The first min_tokens tokens end nothing: the sampler bans tokens that would.
    if ends and sequence.num_output_tokens > sampling.min_tokens:
        return FinishReason.STOP
    num_tokens = len(sequence.token_ids)
    if num_tokens >= sequence.max_tokens or num_tokens >= bounds.max_tokens:
        return FinishReason.LENGTH
    return None
