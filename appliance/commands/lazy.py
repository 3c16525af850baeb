"""A command group that imports a command's file only to run it.

`appliance --help` shows names and one line each; importing every command took half a second.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = "appliance.commands"  # one file for each command, with a function or Typer of its name


class LazyGroup(TyperGroup):
    """The top level of the command line.

    Attributes:
        lines: help line by command; set it on a subclass.
    """

    lines: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands: MutableMapping[str, Any] = CommandsOnDemand(self.lines, dict(self.commands))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command's name and line, without importing it."""
        if cmd_name in self.lines:
            return TyperCommand(cmd_name, help=self.lines[cmd_name], rich_markup_mode=None)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command in the arguments, imported."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else self.commands[str(command.name)], rest


class CommandsOnDemand(MutableMapping[str, Any]):
    """Commands by name; imports one of `lines` on access."""

    def __init__(self, lines: Mapping[str, str], loaded: dict[str, Any]) -> None:
        self._names = list(lines)
        self._loaded = loaded

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            if name not in self._names:
                raise KeyError(name)
            self._loaded[name] = load_command(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._names
        yield from (name for name in self._loaded if name not in self._names)

    def __len__(self) -> int:
        return len({*self._names, *self._loaded})

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]


def load_command(name: str) -> Any:
    """Import a command's file and build its command or group."""
    own = name.replace("-", "_")
    found = getattr(importlib.import_module(f"{FOLDER}.{own}"), own)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name, help=_as_paragraphs(found.__doc__))(found)
        return typer.main.get_command(single)
    group = typer.main.get_group(found)
    group.name = name
    return group


def _as_paragraphs(docstring: str | None) -> str:
    paragraphs = (docstring or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
