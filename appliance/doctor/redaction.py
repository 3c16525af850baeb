"""Removes API keys, and names of people and machines, from a text."""

from __future__ import annotations

import getpass
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.config import config_path, key_file
from appliance.config.api_keys import MIN_LENGTH, read_keys
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from appliance.doctor.finding import Scope

HIDDEN = "[hidden]"

# Keys of this server and of well-known services, passwords in URLs.
_SHAPES = (
    re.compile(r"\b(?:sk|hf|gh[pousr]|xox[a-z])[-_][A-Za-z0-9_\-]{8,}"),
    re.compile(r"(?<=Bearer )\S+"),
    re.compile(r"(?<=://)[^/\s@]+(?=@)"),
    re.compile(r"\bsha256:[0-9a-f]{64}\b"),
)
_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.I)
_FILE = re.compile(r"_FILE\s*$|TLS_KEY\s*$", re.I)  # settings that name files
_ADDRESS = re.compile(r"\b(?!127\.|0\.0\.0\.0\b)\d{1,3}(?:\.\d{1,3}){3}\b")
_COMMON_USERS = frozenset({"root", "user", "appliance", "nobody", "ubuntu", "debian"})


def hide_keys(text: str, scope: Scope) -> str:
    """Replace every API key in the text."""
    for secret in sorted(_secrets(scope), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for shape in _SHAPES:
        text = shape.sub(HIDDEN, text)
    return text


def hide_people(text: str) -> str:
    """Replace home folders, the user's and the machine's name, and network addresses."""
    text = text.replace(str(Path.home()), "~")
    text = re.sub(r"/(home|Users)/[^/\s]+", "~", text)
    names = {_user(): "USER", socket.gethostname(): "HOST"}
    # The longest first: machines are often named after people.
    for name, word in sorted(names.items(), key=lambda pair: -len(pair[0])):
        if len(name) > 1 and name not in {*_COMMON_USERS, "localhost"}:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", word, text)
    return _ADDRESS.sub("ADDRESS", text)


def _secrets(scope: Scope) -> set[str]:
    """Collect the keys, valid or not, of the settings, the key file and the environment."""
    entries = [scope.server.api_key or "", *scope.server.api_keys.values()]
    entries += [text for name, text in os.environ.items() if _is_secret(name)]
    if (file := key_file(scope.server)) is not None:
        try:
            entries += read_keys(file).values()
        except ConfigError:
            entries += _words(file)
    try:
        if (config := config_path(scope.config)) is not None:
            entries += _key_lines(config)
    except ConfigError:
        pass
    words = {word for entry in entries for word in entry.split()[:1]}
    return {word for word in words if len(word) >= MIN_LENGTH}


def _is_secret(name: str) -> bool:
    return _VARIABLE.search(name) is not None and _FILE.search(name) is None


def _words(file: Path) -> list[str]:
    """Find possible keys in a key file, valid or not."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    # The part after the name, or the whole line: a nameless key may contain a =.
    return [part.strip() for line in lines for part in (line.partition("=")[2], line)]


def _key_lines(file: Path) -> list[str]:
    """Find quoted words in a configuration file, or in its key file, that may be keys.

    The file is read as text, since its settings may be invalid.
    """
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return []
    table = re.search(r"^[ \t]*\[server\.api_keys\](.*?)(?=^[ \t]*\[|\Z)", text, re.M | re.S)
    lines = [line for line in text.splitlines() if _is_secret(line.partition("=")[0])]
    found = re.findall(r"[\"']([^\"']+)[\"']", "\n".join([*lines, table[1] if table else ""]))
    for path in re.findall(r"api_key_file\s*=\s*[\"']([^\"']+)[\"']", text):
        found += _words(Path(path).expanduser())
    return found


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no such user
        return ""
