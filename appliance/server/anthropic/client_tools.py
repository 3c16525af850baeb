"""Tools that Anthropic defines and the client runs, as functions with a schema.

The inputs are those that Anthropic's documents give for each; a version is the date in its type.
One flat object holds the arguments of all commands, since some forms of calls, and templates, know
no alternatives.
"""

from __future__ import annotations

import re
from typing import Any

_TEXT: dict[str, Any] = {"type": "string"}
_EDIT = "view create str_replace insert"
_LINES = {"type": "array", "items": {"type": "integer"}, "description": "First and last, to view."}
_FILE = {
    "path": _TEXT,
    "view_range": _LINES,
    "file_text": {"type": "string", "description": "Of the created file."},
    "old_str": {"type": "string", "description": "The text to replace, which is there once."},
    "new_str": {"type": "string", "description": "The text instead."},
    "insert_line": {"type": "integer", "description": "The line to insert after, or 0."},
}
_INSERTED = {"insert_text": {"type": "string", "description": "The text to insert."}}


def _commands(names: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"command": {"type": "string", "enum": names.split()}, **arguments},
        "required": ["command"],
    }


_BASH = {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}}
_EDITOR = "Shows, creates and changes text files on the user's machine, by commands."
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    r"bash_\d+": ("Runs a command in a shell on the user's machine, or restarts it.", _BASH),
    r"text_editor_(20250429|20250728)": (_EDITOR, _commands(_EDIT, {**_FILE, **_INSERTED})),
    # These insert `new_str`.
    r"text_editor_\d+": (_EDITOR, _commands(f"{_EDIT} undo_edit", _FILE)),
    r"memory_\d+": (
        "Keeps notes in text files below /memories, from one conversation to the next.",
        _commands(
            f"{_EDIT} delete rename", {**_FILE, **_INSERTED, "old_path": _TEXT, "new_path": _TEXT}
        ),
    ),
}


def client_tool(kind: str) -> tuple[str, dict[str, Any]] | None:
    """Return description and schema of a tool by its type; None if the client cannot run it."""
    return next((tool for name, tool in _KINDS.items() if re.fullmatch(name, kind)), None)
