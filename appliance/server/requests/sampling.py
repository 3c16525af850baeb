"""Converts a body's fields to `SamplingParams`, and checks lengths against the context."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.engine.nouns.limits import check_beams, check_prompt
from appliance.engine.nouns.sampling_params import GREEDY, SamplingParams
from appliance.errors import ContextLengthError, RequestError
from appliance.text import stop_pieces, with_logprobs

if TYPE_CHECKING:
    from appliance.engine.nouns.messages import EngineInfo
    from appliance.engine.nouns.request import Request
    from appliance.engine.nouns.sampling_params import ThoughtBudget
    from appliance.grammar import Grammar
    from appliance.model_files.sampling_defaults import SamplingDefaults
    from appliance.server.models.model_state import ModelState
    from appliance.server.requests.schema import SamplingFields

RANDOM_SEED = -1  # in vLLM, llama.cpp and Ollama
NO_LIMIT = -1  # of an answer's tokens, in llama.cpp and LM Studio


def limit_of(*given: int | None) -> int | None:
    """Return the first of these that is given, as an answer's token limit."""
    found = next((value for value in given if value is not None), None)
    return found if found is None else max(NO_LIMIT, found)


def sampling_params(
    fields: SamplingFields,
    info: EngineInfo,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None = None,
    budget: ThoughtBudget | None = None,
) -> SamplingParams:
    """Convert a body's fields; null means the default.

    Args:
        defaults: the loaded model's, for random sampling: temperature 0 and beam search ignore
            them.
        max_tokens: result of `completion_budget`.
        logprobs: alternatives per token; None reports nothing.
        budget: for the answer's thought.

    Raises:
        RequestError: a value is out of range, or two exclude each other.
    """
    if fields.stream and fields.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are not streamed; leave stream out", param="stream")
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    # The default is not 0, so an explicit value shows only here.
    if fields.use_beam_search and fields.temperature:
        raise RequestError(
            "temperature does not go with beam search, which takes the likeliest answers; leave "
            "temperature out",
            param="temperature",
        )
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    stop = tuple(filter(None, stop))  # some clients fill a list with empty strings
    given: dict[str, Any] = {
        "n": fields.n,
        "use_beam_search": fields.use_beam_search,
        "length_penalty": fields.length_penalty,
        "early_stopping": fields.early_stopping,
        "min_tokens": fields.min_tokens,
        "temperature": fields.temperature,
        "top_k": None if fields.top_k is None else max(0, fields.top_k),
        "top_p": fields.top_p,
        "min_p": fields.min_p,
        "repetition_penalty": fields.repeat_penalty
        if fields.repetition_penalty is None
        else fields.repetition_penalty,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "ignore_eos": fields.ignore_eos,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not fields.use_beam_search and given.get("temperature", 1.0) >= GREEDY:
        given = {**defaults.values, **given}
    if (window := fields.repeat_last_n) == 0:
        given |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    sampling = SamplingParams(
        **given,
        penalty_window=window if window is not None and window > 0 else None,
        best_of=fields.best_of,
        max_tokens=max_tokens,
        seed=None if fields.seed == RANDOM_SEED else fields.seed,
        stop=stop,
        stop_token_ids=_token_ids("stop_token_ids", fields.stop_token_ids or (), info),
        logit_bias=_logit_bias(fields.logit_bias or {}, info),
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        grammar=grammar,
        thought_budget=budget,
    )
    if fields.stream and (sampling.use_beam_search or sampling.takes_best):
        chosen = "beam search finds" if sampling.use_beam_search else "best_of chooses"
        raise RequestError(
            f"{chosen} its answers at the very end, with nothing to stream; leave stream out",
            param="stream",
        )
    return with_logprobs(sampling)


def completion_budget(
    prompt_tokens: int,
    max_tokens: int | None,
    info: EngineInfo,
    *,
    param: str,
    default: int | None = None,
    picture_rows: int = 0,
) -> int:
    """Return an answer's token limit; prompts are never cut.

    Args:
        max_tokens: the client's limit, if any.
        param: field of the prompt.
        default: limit without a client's, as far as the context allows.
        picture_rows: of the prompt's tokens.

    Raises:
        ContextLengthError: the prompt does not fit.
    """
    context = info.context_length
    try:
        # An encoder has no cache.
        cache_tokens = info.num_blocks * info.block_size if info.num_blocks else context
        check_prompt(
            prompt_tokens,
            context_length=context,
            cache_tokens=cache_tokens,
            generates=max_tokens != 0,
            picture_rows=picture_rows,
        )
    except RequestError as error:
        raise ContextLengthError(error.message, param=param) from None
    room = context - prompt_tokens
    if max_tokens is None:
        return room if default is None else min(default, room)
    return min(max_tokens, room)


def _logit_bias(bias: dict[str, float], info: EngineInfo) -> dict[int, float]:
    for key in bias:
        if not re.fullmatch(r"[0-9]{1,10}", key, re.ASCII):
            raise RequestError(
                f"logit_bias has the key {key[:40]!r}; keys are token ids", param="logit_bias"
            )
    ids = _token_ids("logit_bias", [int(key) for key in bias], info)
    return dict(zip(ids, bias.values(), strict=True))


def _token_ids(name: str, ids: list[int] | tuple[int, ...], info: EngineInfo) -> tuple[int, ...]:
    for token_id in ids:
        if token_id >= info.vocab_size:
            raise RequestError(
                f"{name} has the token id {token_id}; this model has {info.vocab_size} tokens",
                param=name,
            )
    return tuple(ids)


async def prepare_beams(state: ModelState, requests: list[Request]) -> list[Request]:
    """Prepare requests with beam search; return others unchanged.

    Raises:
        RequestError: the engine runs fewer sequences than the request has beams.
    """
    sampling = requests[0].sampling
    if not sampling.use_beam_search:
        return requests
    info, tokenizer = state.serving()
    for request in requests:
        check_beams(
            len(request.prompt_token_ids),
            sampling.num_sequences,
            max_num_seqs=info.max_num_seqs,
            blocks=(info.num_blocks, info.block_size),
            is_recurrent=info.state_bytes > 0,
        )
    if not sampling.stop:
        return requests
    work = partial(stop_pieces, tokenizer, sampling)
    pieces = await state.texts.run(work, owner=requests[0].owner, size=info.vocab_size)
    return [msgspec.structs.replace(request, stop_pieces=pieces) for request in requests]
