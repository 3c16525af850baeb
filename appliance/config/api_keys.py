"""Parses, reads and checks API keys and their holders' limits.

An entry is a key, or `sha256:` and a key's digest, optionally followed by limits such as
`requests=60 tokens=100000 parallel=4 priority=5`. Logs, metrics and dashboards show holders' names.
Nothing shows a key, not even an error message.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from appliance.errors import ConfigError

BARE_NAME = "key"  # holder of a key given without a name
NO_KEY = "none"  # holder in metrics if the server needs no key
MIN_LENGTH = 8  # characters; a shorter key is easy to guess, and NAME=KEY is likely half a key
MAX_FILE_BYTES = 2**20

DIGEST = "sha256:"

_HEX = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[\x21-\x7e]+")  # valid in a header and easy to paste


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of a key's holder; None means no limit.

    Attributes:
        requests: API requests per minute.
        tokens: prompt and generated tokens per minute.
        parallel: requests open at once.
        priority: default and minimum of its requests' priority; lower runs earlier.
    """

    requests: int | None = None
    tokens: int | None = None
    parallel: int | None = None
    priority: int = 0


_BOUNDS = {
    "requests": (1, 10**6),
    "tokens": (1, 10**12),
    "parallel": (1, 10**4),
    "priority": (-100, 100),
}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's digest and its holder's limits."""

    digest: bytes  # SHA-256
    limits: KeyLimits = KeyLimits()
    secret: str | None = field(default=None, repr=False)  # None if only the digest is stored

    @classmethod
    def parse(cls, entry: str, what: str) -> ApiKey:
        """Parse an entry.

        Args:
            entry: the key or its digest, and limits.
            what: the entry's name in error messages, which never contain the key.

        Raises:
            ConfigError: the key or a limit is invalid.
        """
        key, *words = entry.split(" ") if entry else [""]
        limits = _parse_limits([word for word in words if word], what)
        if not key.startswith(DIGEST):
            check_key(key, what)
            return cls(digest_of(key), limits, key)
        digest = key.removeprefix(DIGEST).lower()
        if not _HEX.fullmatch(digest):
            raise ConfigError(f"{what} must have 64 hexadecimal digits behind {DIGEST}")
        return cls(bytes.fromhex(digest), limits)


def new_entry(limits: KeyLimits) -> tuple[str, str]:
    """Return a random key and the entry with its digest."""
    secret = f"sk-{secrets.token_urlsafe(24)}"
    return secret, f"{DIGEST}{digest_of(secret).hex()} {show_limits(limits)}".rstrip()


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1")).digest()  # the encoding of headers


def _parse_limits(words: list[str], what: str) -> KeyLimits:
    found: dict[str, int] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in _BOUNDS or name in found:
            raise ConfigError(
                f"{what} is followed by something else than {', '.join(_BOUNDS)}, each once and "
                "with = and a number"
            )
        low, high = _BOUNDS[name]
        if not re.fullmatch(r"-?\d{1,15}", value) or not low <= int(value) <= high:
            raise ConfigError(f"{what}: {name} must be a whole number from {low} to {high}")
        found[name] = int(value)
    return KeyLimits(**found)


def show_limits(limits: KeyLimits) -> str:
    """Format limits as in an entry; return "" if there are none."""
    pairs = [(one.name, getattr(limits, one.name), one.default) for one in fields(limits)]
    return " ".join(f"{name}={value}" for name, value, usual in pairs if value != usual)


def check_key(key: str, what: str) -> None:
    """Raise ConfigError, with the key's length only, if a key is unusable or easy to guess."""
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{what} must be printable ASCII without spaces")
    if len(key) < MIN_LENGTH:
        raise ConfigError(
            f"{what} is too short: it has {len(key)} of at least {MIN_LENGTH} characters; make one "
            "with: openssl rand -hex 16"
        )


def check_private(path: Path, mode: int) -> None:
    """Raise ConfigError, with the command that fixes it, if other users can read a file of keys."""
    if mode & 0o077:
        raise ConfigError(
            f"{path} holds API keys and is open to other users; run: "
            f"chmod 600 {shlex.quote(str(path))}"
        )


def check_keys(bare: str | None, named: Mapping[str, str]) -> dict[str, ApiKey]:
    """Parse all keys that a server accepts, by name; empty if it needs none.

    Args:
        bare: entry of the key without a name, or empty.
        named: entries by name.

    Raises:
        ConfigError: a name or a key is invalid or occurs twice.
    """
    if bare and BARE_NAME in named:
        raise ConfigError(
            f"the API key name {BARE_NAME!r} is that of the key without a name; choose another"
        )
    keys = {BARE_NAME: ApiKey.parse(bare, "the API key")} if bare else {}
    for name, entry in named.items():
        keys[name] = _parse(name, entry, f"the API key of {name!r}")
    holders: dict[bytes, str] = {}
    for name, key in keys.items():
        if (other := holders.setdefault(key.digest, name)) != name:
            raise ConfigError(
                f"{other!r} and {name!r} have the same API key; give each a key of its own"
            )
    return keys


def read_keys(path: Path) -> dict[str, str]:
    """Read entries by name from a file with a line NAME=ENTRY for each.

    Skips empty lines and comments (#). A single word without = is the key without a name.

    Raises:
        ConfigError: the file is unreadable or has an invalid line; the message gives the line's
            number, never its content.
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
        name, found, entry = (part.strip() for part in line.partition("="))
        if not found:
            name, entry = BARE_NAME, name
        _parse(name, entry, f"{path}, line {number}: the key in NAME=KEY")
        if name in keys:
            raise ConfigError(f"{path}, line {number}: {name!r} has a key already, further up")
        keys[name] = entry
    if not keys:
        raise ConfigError(f"there is no key in the API key file {path}; add a line NAME=KEY")
    return keys


def _parse(name: str, entry: str, what: str) -> ApiKey:
    if name == NO_KEY or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} has a name that cannot be used: letters, digits, '.', '_' and '-' can, "
            f"64 at most, but not {NO_KEY!r}"
        )
    return ApiKey.parse(entry, what)
