"""`appliance docs`: shows this version's documentation in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from appliance.docs import NAMES, read
from appliance.errors import ConfigError


def docs(
    topic: Annotated[
        str | None, typer.Argument(help="What to read; without one, the list of topics.")
    ] = None,
) -> None:
    """Read the documentation; it needs no network."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    if topic is None:
        for name in NAMES:
            console.print(f"[bold]{name:18}[/]{read(name).title}")
        console.print("\nappliance docs TOPIC shows one; its first letters are enough.")
        return
    page = read(_named(topic))
    if not sys.stdout.isatty():
        sys.stdout.write(page.text)
        return
    with console.pager(styles=True, links=False):
        console.print(Markdown(page.text, hyperlinks=False))


def _named(topic: str) -> str:
    """Find the topic with this prefix.

    Raises:
        ConfigError: the prefix has no match or several.
    """
    wanted = topic.lower().removesuffix(".md")
    found = [wanted] if wanted in NAMES else [name for name in NAMES if name.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    which = f"is one of {', '.join(found)}" if found else "is none of the topics"
    raise ConfigError(f"{topic!r} {which}; there are: {', '.join(NAMES)}")
