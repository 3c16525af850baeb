"""How much a request wants the model to think, as variables for its chat template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from appliance.errors import RequestError
from appliance.tokenizer.chat_template import check_nesting

if TYPE_CHECKING:
    from appliance.server.schema import ChatRequest

MAX_OPTIONS = 64
MAX_OPTION_CHARACTERS = 16 * 1024  # as JSON
# What the server itself says to a template.
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}  # templates know three


def template_options(body: ChatRequest) -> dict[str, Any]:
    """`reasoning_effort` and `chat_template_kwargs`; the latter wins.

    Raises:
        RequestError: there are too many, or one of them has a field of its own.
    """
    options: dict[str, Any] = {}
    effort = body.reasoning_effort
    if effort is not None:
        # The two names by which templates know it.
        options["enable_thinking"] = options["thinking"] = effort != "none"
        if effort != "none":
            options["reasoning_effort"] = _EFFORTS.get(effort, effort)
    given = body.chat_template_kwargs or {}
    if taken := _RESERVED & given.keys():
        raise RequestError(
            f"chat_template_kwargs has {min(taken)!r}, which is no option of the template; leave "
            "it out",
            param="chat_template_kwargs",
        )
    check_nesting(given, "chat_template_kwargs")
    size = len(json.dumps(given, ensure_ascii=False))
    if len(given) > MAX_OPTIONS or size > MAX_OPTION_CHARACTERS:
        raise RequestError(
            f"chat_template_kwargs has {len(given)} entries and {size} characters; at most "
            f"{MAX_OPTIONS} and {MAX_OPTION_CHARACTERS} are accepted",
            param="chat_template_kwargs",
        )
    return {**options, **given}
