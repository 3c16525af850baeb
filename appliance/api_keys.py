"""API keys by the names of their holders: where they are read from, and which are refused.

Names go into logs, metrics and dashboards; keys go nowhere, error messages included.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from appliance.errors import ConfigError

BARE_NAME = "key"  # of a key that was given without a name
NO_KEY = "none"  # what metrics call requests where no key is wanted
MIN_LENGTH = 8  # characters of a key; below that it is soon guessed, and NAME=KEY likely half a key
MAX_FILE_BYTES = 2**20

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[\x21-\x7e]+")  # what a header can carry, and a person can paste


def check_key(key: str, what: str) -> None:
    """Make sure that a key can be used and is not soon guessed.

    Args:
        key: as a client sends it.
        what: what to call it in messages.

    Raises:
        ConfigError: it is not; the message has its length, and never the key.
    """
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{what} must be printable ASCII without spaces")
    if len(key) < MIN_LENGTH:
        raise ConfigError(
            f"{what} is too short: it has {len(key)} of at least {MIN_LENGTH} characters; make one "
            "with: openssl rand -hex 16"
        )


def check_private(path: Path, mode: int) -> None:
    """Make sure that nobody else may read a file that holds keys.

    Args:
        path: of the file, for the message.
        mode: of the file as it was read.

    Raises:
        ConfigError: it is open to others; the message has the command that mends it.
    """
    if mode & 0o077:
        raise ConfigError(
            f"{path} holds API keys and is open to other users; run: "
            f"chmod 600 {shlex.quote(str(path))}"
        )


def check_keys(bare: str | None, named: Mapping[str, str]) -> dict[str, str]:
    """Name to key, of all that a server knows; empty if it wants none.

    Args:
        bare: a key without a name; empty counts as none.
        named: keys by name.

    Raises:
        ConfigError: a name or a key cannot be used, or stands there twice.
    """
    if bare and BARE_NAME in named:
        raise ConfigError(
            f"the API key name {BARE_NAME!r} is that of the key without a name; choose another"
        )
    if bare:
        check_key(bare, "the API key")
    for name, key in named.items():
        _check(name, key, f"the API key of {name!r}")
    keys = ({BARE_NAME: bare} if bare else {}) | dict(named)
    holders: dict[str, str] = {}
    for name, key in keys.items():
        if (other := holders.setdefault(key, name)) != name:
            raise ConfigError(
                f"{other!r} and {name!r} have the same API key; give each a key of its own"
            )
    return keys


def read_keys(path: Path) -> dict[str, str]:
    """Keys by name from a file with a line NAME=KEY for each.

    Empty lines and those that begin with # are skipped; a line without = is a key without a name.

    Raises:
        ConfigError: the file cannot be read, or has a line that cannot be used; the message has
            the number of the line and never what stands there.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
            mode = os.fstat(file.fileno()).st_mode
        text = content.decode("ascii")
    except OSError as error:
        raise ConfigError(f"the API key file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the API key file {path} is not plain ASCII text") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"the API key file {path} is larger than {MAX_FILE_BYTES >> 20} MiB")
    check_private(path, mode)
    keys: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        name, found, key = (part.strip() for part in line.partition("="))
        if not found:
            name, key = BARE_NAME, name
        _check(name, key, f"{path}, line {number}: the key in NAME=KEY")
        if name in keys:
            raise ConfigError(f"{path}, line {number}: {name!r} has a key already, further up")
        keys[name] = key
    if not keys:
        raise ConfigError(f"there is no key in the API key file {path}; add a line NAME=KEY")
    return keys


def _check(name: str, key: str, what: str) -> None:
    if name == NO_KEY or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} has a name that cannot be used: letters, digits, '.', '_' and '-' can, "
            f"64 at most, but not {NO_KEY!r}"
        )
    check_key(key, what)
