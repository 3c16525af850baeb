"""Refuses unsupported fields by name if they would change the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.errors import RequestError

_NOTHING: tuple[Any, ...] = (None, False, "", [], {})

# Values without effect, by field.
_ANYWHERE: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": _NOTHING,
    "bad_words": _NOTHING,
    "include_stop_str_in_output": _NOTHING,
    "logits_processors": _NOTHING,
    "prompt_embeds": _NOTHING,
    "skip_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
}
CHAT: dict[str, tuple[Any, ...]] = _ANYWHERE | {
    "add_generation_prompt": (None, True),
    "audio": _NOTHING,
    "chat_template": _NOTHING,
    "continue_final_message": _NOTHING,
    "documents": _NOTHING,
    "echo": _NOTHING,
    "function_call": (*_NOTHING, "none", "auto"),
    "functions": _NOTHING,
    "modalities": (*_NOTHING, ["text"]),
    "web_search_options": (None,),
}
COMPLETION: dict[str, tuple[Any, ...]] = _ANYWHERE
# Accepted without effect, as by other servers.
HARMLESS = {
    "metadata",
    "prediction",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "verbosity",
}


def refuse_unsupported(fields: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise RequestError for the first field with an unsupported value."""
    for name in fields.keys() & table.keys():
        value = fields[name]
        if value in table[name]:
            continue
        raise RequestError(
            f"{name} is not supported here; leave it out", param=name, code="unsupported_parameter"
        )
