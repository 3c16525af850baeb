"""`appliance docs`: shows this version's documentation in the terminal."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

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
    pager = _pager()
    if pager is not None and not pager.shows_styles:
        console = Console(color_system=None, force_terminal=False)
    with console.capture() as printed:
        console.print(Markdown(page.text, hyperlinks=False))
    if pager is None or not _page_through(pager, printed.get()):
        sys.stdout.write(printed.get())


class _Pager(NamedTuple):
    """A command for the shell, which reads a text from its standard input."""

    command: str
    shows_styles: bool


def _pager() -> _Pager | None:
    """Return the pager of PAGER, else `less` or `more`; None to print without one."""
    found = next(filter(shutil.which, ("less", "more")), "")
    command = os.environ.get("PAGER", found).strip()
    if not command or command == "cat" or os.environ.get("TERM") in (None, "", "dumb"):
        return None
    try:
        is_less = Path(shlex.split(command)[0]).name == "less"
    except ValueError:  # an open quote: the shell says so
        is_less = False
    if not is_less or any(sign in command for sign in "|;&<>"):
        return _Pager(command, shows_styles=False)
    # Without -R it prints the styles' escape sequences as text.
    return _Pager(f"{command} -R", shows_styles=True)


def _page_through(pager: _Pager, text: str) -> bool:
    """Return False if the pager could not be started."""
    # As git does: short texts stay on the screen.
    environment = {"LESS": "FX", **os.environ}
    with subprocess.Popen(
        pager.command,
        shell=True,
        stdin=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        while True:
            try:
                process.communicate(text)
                break
            except KeyboardInterrupt:  # the pager's to handle, which runs on
                continue
    return process.returncode not in (126, 127)


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
