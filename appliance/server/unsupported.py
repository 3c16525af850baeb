"""Fields that would change the answer but are not supported: refused by name, never swallowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.errors import RequestError

_NOTHING: tuple[Any, ...] = (None, False, "", [], {})

# Name to the values that ask for nothing beyond what is done anyway.
_ANYWHERE: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": _NOTHING,
    "bad_words": _NOTHING,
    "grammar": _NOTHING,
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
# Accepted and without effect here, as they are elsewhere.
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
    """Refuse the first field that asks for something that would not be done.

    Raises:
        RequestError: names the field.
    """
    for name in fields.keys() & table.keys():
        value = fields[name]
        if value in table[name]:
            continue
        raise RequestError(
            f"{name} is not supported here; leave it out", param=name, code="unsupported_parameter"
        )
