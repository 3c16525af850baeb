"""Limits of prompts and answers: requests to refuse, and when a sequence ends.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.engine.nouns.request import FinishReason
from appliance.errors import ContextLengthError, RequestError

if TYPE_CHECKING:
    from appliance.engine.nouns.messages import EngineInfo
    from appliance.engine.nouns.request import Request
    from appliance.engine.nouns.sequence import Sequence


# Of a scored prompt: so many rows have logits at once. Each pass reads the whole head, so fewer
# would be slower.
LOGIT_ROWS = 64
# Maximum number of sampling rows in a step with several per sequence: scoring needs that memory for
# logits anyway.
SAMPLE_ROWS = 40


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of a step and of a sequence.

    With at least as many rows as sequences, every running sequence advances in every step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int  # rows of one step
    context_length: int  # tokens of one sequence, prompt and answer
    verifies: bool = True  # sequences may have several rows that sample, to verify drafts
    # Of a step's rows, those for the rest of a picture that no step may cut; 0: steps may.
    spare_rows: int = 0

    @property
    def planned_rows(self) -> int:
        """Rows of a step, unless a picture needs the spare ones."""
        return self.max_num_batched_tokens - self.spare_rows

    @property
    def sample_rows(self) -> int:
        """Maximum number of rows that sample in a step, drafts included."""
        return max(self.max_num_seqs, SAMPLE_ROWS) if self.verifies else self.max_num_seqs

    def __post_init__(self) -> None:
        assert self.max_num_seqs > 0
        assert 0 <= self.spare_rows < self.max_num_batched_tokens
        assert self.context_length > 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits that end every answer of an engine.

    Attributes:
        block_size: token slots per block.
        eos_token_ids: tokens that end an answer, unless its request ignores them.
        is_recurrent: the model has recurrent state.
        max_tokens: maximum length of a sequence, prompt and answer.
    """

    limits: SchedulerLimits
    num_blocks: int
    block_size: int
    eos_token_ids: frozenset[int] = frozenset()
    is_recurrent: bool = False
    max_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        # Sampling a token needs all tokens before it in the cache, but not the token itself.
        most = min(self.limits.context_length, self.num_blocks * self.block_size + 1)
        object.__setattr__(self, "max_tokens", most)


def check_request(request: Request, bounds: Bounds) -> None:
    """Refuse a request that can never run.

    Raises:
        ContextLengthError: the prompt leaves no room in the context for an answer.
        RequestError: the prompt is empty or fills the KV cache, or there are too few sequences or
            blocks for all beams at once.
    """
    num_tokens, sampling = len(request.prompt_token_ids), request.sampling
    check_prompt(
        num_tokens,
        context_length=bounds.limits.context_length,
        cache_tokens=bounds.num_blocks * bounds.block_size,
        generates=request.generates,
        picture_rows=0 if request.pictures is None else request.pictures.num_rows,
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
    num_tokens: int,
    *,
    context_length: int,
    cache_tokens: int,
    generates: bool = True,
    picture_rows: int = 0,
) -> None:
    """Refuse a prompt that leaves no room for an answer.

    Args:
        context_length: tokens of one sequence, prompt and answer.
        cache_tokens: slots of the whole KV cache.
        generates: the request has an answer; without one the prompt may fill either.
        picture_rows: tokens that pictures are.

    Raises:
        ContextLengthError: the prompt fills the context.
        RequestError: the prompt is empty or fills the KV cache.
    """
    limit = num_tokens + generates
    if num_tokens == 0:
        raise RequestError("the prompt is empty; send at least one token", param="prompt")
    tokens = f"{num_tokens} tokens"
    shorten = "shorten the prompt"
    if picture_rows:
        tokens += f" ({picture_rows} of them image tokens)"
        shorten += ", send fewer or smaller pictures or detail low, or limit them by --image-tokens"
    if limit > context_length:
        raise ContextLengthError(
            f"the prompt has {tokens}, the context holds {context_length} for prompt "
            f"and answer together; {shorten}"
        )
    if limit > cache_tokens:
        raise RequestError(
            f"the prompt has {tokens}, the KV cache holds {cache_tokens} for prompt "
            f"and answer together; {shorten} or give the server more KV cache memory",
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
        max_num_seqs: sequences that run at once.
        blocks: of the KV cache: their number, and the token slots of each.
        is_recurrent: the model has recurrent state.

    Raises:
        RequestError: there are too few sequences or blocks for all beams at once.
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
    needed = sampling.num_candidates(info.eos_token_ids)
    if sampling.use_beam_search and needed > info.vocab_size:
        raise RequestError(
            f"so many beams and stop tokens need a vocabulary of {needed} tokens, and this "
            f"model has {info.vocab_size}; ask for fewer beams",
            param="best_of",
        )


def max_beam_tokens(
    num_tokens: int, width: int, block_size: int, num_blocks: int, *, is_recurrent: bool = False
) -> int:
    """Return the maximum length, prompt and answer, that all beams can have at once.

    Beams certainly share only the prompt's full blocks. With recurrent state not even these: after
    a preemption they share blocks only up to a checkpoint.
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
    # Before min_tokens nothing ends: the sampler bans tokens that would.
    if ends and sequence.num_output_tokens > sampling.min_tokens:
        return FinishReason.STOP
    num_tokens = len(sequence.token_ids)
    if num_tokens >= sequence.max_tokens or num_tokens >= bounds.max_tokens:
        return FinishReason.LENGTH
    return None
