"""The tools that a request offers, checked, and what it wants done with them."""

from __future__ import annotations

import json
import re
import secrets
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.dialects.turns import SHORT_ID
from appliance.errors import RequestError
from appliance.server.schema import NamedTool
from appliance.tokenizer.chat_template import check_nesting

if TYPE_CHECKING:
    from appliance.server.schema import ChatRequest, Tool

MAX_TOOLS = 128
MAX_TOOL_CHARACTERS = 512 * 1024  # of all definitions, as JSON
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Tools:
    """What may be called, and what has to be.

    Attributes:
        definitions: for the model; None if it may call none.
        schemas: of the arguments, by name.
        required: names of which one has to be called; empty if the model may choose.
        strict: names of those whose schema the arguments have to obey.
        one_call: there may be one call at most.
    """

    definitions: tuple[dict[str, Any], ...] | None = None
    schemas: dict[str, dict[str, Any]] | None = None
    required: tuple[str, ...] = ()
    strict: frozenset[str] = frozenset()
    one_call: bool = False

    @classmethod
    def of(cls, body: ChatRequest) -> Tools:
        """The tools of a request.

        Raises:
            RequestError: a definition is wrong, or the choice fits none.
        """
        offered = body.tools or []
        if len(offered) > MAX_TOOLS:
            raise RequestError(
                f"there are {len(offered)} tools; at most {MAX_TOOLS} are accepted", param="tools"
            )
        definitions = tuple(
            _definition(tool, f"tools[{number}]") for number, tool in enumerate(offered)
        )
        if (size := len(json.dumps(definitions, ensure_ascii=False))) > MAX_TOOL_CHARACTERS:
            raise RequestError(
                f"the tools have {size} characters as JSON; at most {MAX_TOOL_CHARACTERS} are "
                "accepted",
                param="tools",
            )
        schemas = {one["function"]["name"]: one["function"]["parameters"] for one in definitions}
        if len(schemas) < len(definitions):
            names = [one["function"]["name"] for one in definitions]
            twice = next(name for name in names if names.count(name) > 1)
            raise RequestError(f"there are two tools of the name {twice!r}", param="tools")
        required = _required(body, tuple(schemas))
        if required:
            raise RequestError(
                "tool_choice can be auto or none here; a call that has to be is not supported",
                param="tool_choice",
                code="unsupported_parameter",
            )
        if not definitions or body.tool_choice == "none":
            return cls()
        return cls(
            definitions=definitions,
            schemas=schemas,
            required=required,
            strict=frozenset(tool.function.name for tool in offered if tool.function.strict),
            one_call=body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool),
        )


def new_call_id(*, short: bool) -> str:
    """An id that no other call has.

    Args:
        short: nine letters and digits, as some templates want them.
    """
    if short:
        return "".join(secrets.choice(_ID_LETTERS) for _ in range(SHORT_ID))
    return f"call_{secrets.token_hex(12)}"


def _definition(tool: Tool, where: str) -> dict[str, Any]:
    """One tool as templates expect it."""
    if tool.type != "function":
        raise RequestError(
            f"{where} is of type {tool.type[:40]!r}; only function tools are supported here",
            param="tools",
        )
    function = tool.function
    if not _NAME.fullmatch(function.name):
        raise RequestError(
            f"{where} has the name {function.name[:80]!r}; a name has 1 to 64 letters, digits, "
            "underscores and dashes",
            param="tools",
        )
    parameters = function.parameters or {}
    check_nesting(parameters, "tools")
    if parameters.get("type", "object") != "object":
        raise RequestError(
            f"{where}.function.parameters must be the schema of an object", param="tools"
        )
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict):
        raise RequestError(
            f"{where}.function.parameters.properties must be an object", param="tools"
        )
    return {
        "type": "function",
        "function": {
            "name": function.name,
            "description": function.description or "",
            # Templates read both without asking.
            "parameters": {"type": "object", "properties": properties, **parameters},
        },
    }


def _required(body: ChatRequest, names: tuple[str, ...]) -> tuple[str, ...]:
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        if choice.type != "function":
            raise RequestError(
                f"tool_choice has the type {choice.type[:40]!r}; only function is supported",
                param="tool_choice",
            )
        if choice.function.name not in names:
            raise RequestError(
                f"tool_choice names {choice.function.name[:80]!r}, which is not among the tools",
                param="tool_choice",
            )
        return (choice.function.name,)
    if choice == "required":
        if not names:
            raise RequestError(
                "tool_choice is required, but there are no tools", param="tool_choice"
            )
        return names
    return ()
