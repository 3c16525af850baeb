"""Refuses fields by name that would change the answer: unsupported ones and other protocols'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.errors import RequestError
from appliance.server.requests.schema import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NOTHING: tuple[Any, ...] = (None, False, "", [], {})

# By field, its values without effect; or, of another protocol's field, the name of it here.
Table = dict[str, tuple[Any, ...] | str]

# Names of one thing in the protocols that clients know. An answer's limit, for example, is
# `max_tokens` in one and `max_output_tokens` in another.
_SAME: dict[str, tuple[str, ...]] = {
    "limit": (
        "max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens",
        "num_predict", "n_predict",
    ),
    "stop": ("stop", "stop_sequences"),
    "format": (
        "response_format", "format", "text", "output_config", "output_format",
        "structured_outputs", "json_schema", "grammar", "regex", "ebnf",
        "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    ),
    "system": ("system", "instructions"),
    "conversation": ("messages", "input", "prompt"),
    "past": ("previous_response_id", "conversation"),
    "thinking": (
        "reasoning_effort", "reasoning", "thinking", "think", "enable_thinking",
        "thinking_budget", "thinking_token_budget", "chat_template_kwargs",
    ),
    "tools": ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
    "repetition": ("repetition_penalty", "repeat_penalty"),
    **{
        name: (name,)
        for name in (
            "temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of", "logit_bias",
            "presence_penalty", "frequency_penalty", "repeat_last_n", "logprobs",
            "top_logprobs", "prompt_logprobs", "min_tokens", "ignore_eos", "stop_token_ids",
            "use_beam_search", "echo", "suffix", "options",
        )
    },
}  # fmt: skip
# Values of another protocol's fields that ask for nothing, beside null and empty ones.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "repetition_penalty", "repeat_penalty"), (1,)),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "min_tokens"), (0,)),
    **dict.fromkeys(("logprobs", "ignore_eos", "use_beam_search", "echo"), (False,)),
    "top_logprobs": (0,),
    "top_k": (0, -1),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
    "seed": (-1,),
}


def foreign(own: Iterable[str], here: Mapping[str, str]) -> Table:
    """Return the fields of other protocols.

    Args:
        own: fields that this protocol has, whether supported or not.
        here: name of a thing in this protocol, by its key in `_SAME`.
    """
    own = set(own)
    return {
        name: here.get(thing, "")
        for thing, names in _SAME.items()
        for name in names
        if name not in own
    }


# Values without effect, by field. From `typical_p` on: samplers that other servers have.
_ANYWHERE: Table = {
    "allowed_token_ids": NOTHING,
    "bad_words": NOTHING,
    "include_stop_str_in_output": NOTHING,
    "logits_processors": NOTHING,
    "prompt_embeds": NOTHING,
    "return_token_ids": NOTHING,
    "return_tokens_as_token_ids": NOTHING,
    "skip_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "lora": NOTHING,
    "typical_p": (None, 1),
    "tfs_z": (None, 1),
    "top_a": (None, 0),
    "top_n_sigma": (None, 0, -1),
    "mirostat": (None, 0),
    "mirostat_mode": (None, 0),
    "dry_multiplier": (None, 0),
    "dynatemp_range": (None, 0),
    "xtc_probability": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "n_probs": (None, 0),
}
# Accepted without effect, as by other servers.
HARMLESS = {
    "metadata", "moderation", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "verbosity",
    # llama.cpp's and Ollama's
    "cache_prompt", "id_slot", "n_keep", "timings_per_token", "num_ctx", "keep_alive",
    # of samplers that are off
    "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
}  # fmt: skip
# Ollama's options that are of its machine or of its cache; goose sends them to its OpenAI routes.
_OF_OLLAMA = {
    "num_ctx", "num_keep", "num_batch", "num_gpu", "num_thread", "numa", "main_gpu", "low_vram",
    "f16_kv", "use_mmap", "use_mlock", "vocab_only", "logits_all", "embedding_only",
    "penalize_newline",
}  # fmt: skip
_CHAT: Table = _ANYWHERE | {
    "add_special_tokens": (None, False),
    "audio": NOTHING,
    "chat_template": NOTHING,
    "documents": NOTHING,
    "echo": NOTHING,
    "include_reasoning": (None, True),
    "modalities": (*NOTHING, ["text"]),
    "reasoning.exclude": NOTHING,
    "separate_reasoning": (None, True),
    "web_search_options": (None,),
}
CHAT: Table = _CHAT | foreign(
    {*ChatRequest.__struct_fields__, *_CHAT, *HARMLESS},
    {
        "limit": "max_completion_tokens",
        "stop": "stop",
        "format": "response_format",
        "system": "messages, with a turn of the role system",
        "conversation": "messages",
        "past": "messages, with the whole conversation",
        "thinking": "reasoning_effort",
    },
)
_COMPLETION: Table = _ANYWHERE | {"add_special_tokens": (None, True)}
COMPLETION: Table = _COMPLETION | foreign(
    # Without a chat template nothing switches thoughts.
    {*CompletionRequest.__struct_fields__, *_COMPLETION, *HARMLESS, *_SAME["thinking"]},
    {
        "limit": "max_tokens",
        "stop": "stop",
        "format": "response_format",
        "conversation": "prompt",
        "top_logprobs": "logprobs",
    },
)


def refuse_unsupported(fields: Mapping[str, Any], table: Table) -> None:
    """Raise RequestError for the first field with an unsupported value.

    Args:
        table: a name with a dot is of a field within an object.
    """
    for name, known in table.items():
        first, _, inner = name.partition(".")
        value = fields.get(first)
        if inner:
            value = value.get(inner) if isinstance(value, dict) else None
        if value is None:
            continue
        if not isinstance(known, str):
            if value in known:
                continue
            raise _refused(name, f"{name} is not supported here; leave it out")
        if name == "options" and isinstance(value, dict):
            _refuse_options(value, table)
        elif not _asks_nothing(inner or first, value):
            repeats = known != name and fields.get(known) == value  # the field that counts here
            if not repeats:
                raise _foreign(name, known)


def _refuse_options(options: Mapping[str, Any], table: Table) -> None:
    """Raise RequestError for the first of Ollama's options that would change the answer."""
    for name, value in options.items():
        known = table.get(name, name)
        if name not in _OF_OLLAMA | HARMLESS and not _asks_nothing(name, value):
            raise _foreign(f"options.{name[:80]}", known[:80] if isinstance(known, str) else "")


def _asks_nothing(name: str, value: Any) -> bool:
    return value in (None, "", [], {}, *_NEUTRAL.get(name, ()))


def _foreign(name: str, here: str) -> RequestError:
    instead = f"the field here is {here}" if here else "leave it out"
    return _refused(name, f"{name} is not a field of this protocol; {instead}")


def _refused(name: str, message: str) -> RequestError:
    return RequestError(message, param=name, code="unsupported_parameter")
