"""Tools whose calls are no functions in the Responses API: custom ones, and those of coding agents.

A model calls each as a function; here its definition, and the item of a call from its arguments
and back.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from appliance.errors import RequestError
from appliance.server.openai_responses.answers import (
    ApplyPatchCallItem,
    CustomCallItem,
    ExecAction,
    LocalShellCallItem,
    PatchOperation,
    ShellAction,
    ShellCallItem,
)
from appliance.server.requests.tools import (
    Offer,
    arguments_with,
    custom_offer,
    input_of,
    read_arguments,
)

if TYPE_CHECKING:
    from appliance.server.openai_responses.answers import BuiltInCall, Status
    from appliance.server.openai_responses.schema import Item, ResponsesTool

CUSTOM, LOCAL_SHELL, SHELL, APPLY_PATCH = "custom", "local_shell", "shell", "apply_patch"
_STRING = {"type": "string"}
_SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    LOCAL_SHELL: (
        "Runs a command on the user's machine and returns its output.",
        {
            "type": "object",
            "properties": {
                "command": {
                    "type": "array",
                    "items": _STRING,
                    "description": "The program and its arguments.",
                },
                "working_directory": _STRING,
                "timeout_ms": {"type": "integer"},
            },
            "required": ["command"],
        },
    ),
    SHELL: (
        "Runs commands in a shell on the user's machine, side by side, and returns their output.",
        {
            "type": "object",
            "properties": {
                "commands": {"type": "array", "items": _STRING},
                "timeout_ms": {"type": "integer"},
                "max_output_length": {"type": "integer", "description": "In characters."},
            },
            "required": ["commands"],
        },
    ),
    APPLY_PATCH: (
        "Creates, changes or deletes one file.",
        {
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                "path": _STRING,
                "diff": {
                    "type": "string",
                    "description": (
                        "The changed lines after @@ with their context, as in a unified diff; "
                        "not needed to delete a file."
                    ),
                },
            },
            "required": ["type", "path"],
        },
    ),
}
BUILT_IN = frozenset(_SCHEMAS)


def offer_of(tool: ResponsesTool, place: str) -> Offer:
    """Return the function as which a model calls a tool.

    Raises:
        RequestError: a custom tool's format is unknown, or a shell is not the client's.
    """
    if (tool.environment or {}).get("type", "local") != "local":
        raise RequestError(
            f"{place}.environment is a container at OpenAI; the type here is local, for which the "
            "client runs the commands",
            param="tools",
            code="unsupported_tool",
        )
    if tool.type in BUILT_IN:
        description, schema = _SCHEMAS[tool.type]
        return Offer(tool.type, schema, place, description)
    form = tool.format
    where = f"{place}.format"
    return custom_offer(
        tool.name or "", tool.description, None if form is None else form.type, form, where, where
    )


def call_item(kind: str, name: str, number: str, call_id: str) -> BuiltInCall:
    """Return the item of a call that begins."""
    if kind == LOCAL_SHELL:
        return LocalShellCallItem(id=f"lsh_{number}", call_id=call_id)
    if kind == SHELL:
        return ShellCallItem(id=f"sh_{number}", call_id=call_id)
    if kind == APPLY_PATCH:
        return ApplyPatchCallItem(id=f"apc_{number}", call_id=call_id)
    return CustomCallItem(id=f"ctc_{number}", call_id=call_id, name=name)


def fill(item: BuiltInCall, text: str, status: Status) -> None:
    """Complete an item from a call's arguments as JSON; cut ones are read as far as they go."""
    item.status = status
    if isinstance(item, CustomCallItem):
        item.input = input_of(text)
        return
    found = read_arguments(text)
    match item:
        case LocalShellCallItem():
            command = found.get("command", [])
            words = command.split() if isinstance(command, str) else command
            timeout, folder = found.get("timeout_ms"), found.get("working_directory")
            item.action = ExecAction(
                command=[str(word) for word in words] if isinstance(words, list) else [],
                timeout_ms=timeout if isinstance(timeout, int) else None,
                working_directory=folder if isinstance(folder, str) else None,
            )
        case ShellCallItem():
            commands = found.get("commands", [])
            timeout, length = found.get("timeout_ms"), found.get("max_output_length")
            item.action = ShellAction(
                commands=list(map(str, commands if isinstance(commands, list) else [commands])),
                timeout_ms=timeout if isinstance(timeout, int) else None,
                max_output_length=length if isinstance(length, int) else None,
            )
        case ApplyPatchCallItem():
            texts = {name: str(found[name]) for name in ("type", "path", "diff") if name in found}
            item.operation = PatchOperation(**texts)
            if item.operation.type == "delete_file":
                item.operation.diff = UNSET
            if status == "incomplete":
                item.status = "in_progress"  # the type has no other word for it


def call_of(item: Item) -> tuple[str, str] | None:
    """Return name and arguments, as JSON, of a history's call; None of another item."""
    match item.type:
        case "custom_tool_call" if item.name is not None:
            return item.name, arguments_with(item.input or "")
        case "local_shell_call" | "shell_call":
            action = {
                name: value
                for name, value in (item.action or {}).items()
                if value not in (None, {}) and name != "type"
            }
            name = LOCAL_SHELL if item.type == "local_shell_call" else SHELL
            return name, json.dumps(action, ensure_ascii=False)
        case "apply_patch_call":
            return APPLY_PATCH, json.dumps(item.operation or {}, ensure_ascii=False)
    return None
