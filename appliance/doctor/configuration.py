"""Checks settings: that they are readable, their origins, and access to their files."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from appliance.config import (
    SECTIONS,
    config_path,
    key_file,
    known_keys,
    unknown_variables,
    written_settings,
)
from appliance.config.setting import fields_of
from appliance.doctor.finding import Finding, Grade, Scope
from appliance.errors import ConfigError
from appliance.wording import counted

_LIST = "`appliance settings` lists all there are"


def check_settings(scope: Scope) -> Iterator[Finding]:
    """Read every section, and list non-default settings with their origins."""
    try:
        file = config_path(scope.config)
    except ConfigError as error:
        yield Finding("settings", Grade.FAIL, str(error), "name a file that is there")
        return
    where = str(file) if file is not None else "no configuration file"
    try:
        lines = [line for section in SECTIONS for line in _changed(section, file)]
    except ConfigError as error:
        yield Finding("settings", Grade.FAIL, str(error), f"correct it; {_LIST}")
        return
    found = f"{where}; all at their defaults" if not lines else f"{where}; {'; '.join(lines)}"
    yield Finding("settings", Grade.OK, found)


def check_variables(scope: Scope) -> Iterator[Finding]:
    """Find unknown variables that look like settings."""
    unknown = list(unknown_variables())
    for message in unknown:
        yield Finding("variables", Grade.WARN, message, f"rename or unset it; {_LIST}")
    if not unknown:
        yield Finding("variables", Grade.OK, "no APPLIANCE_ variable is unknown")


def check_private_files(scope: Scope) -> Iterator[Finding]:
    """Check that other users can neither read keys nor change settings."""
    server = scope.server
    try:
        keys = known_keys(server)
    except ConfigError as error:
        yield Finding("API keys", Grade.FAIL, str(error), "follow this message, then try again")
    else:
        held = f", some in {file}" if (file := key_file(server)) is not None else ""
        found = f"{counted(len(keys), 'key')}{held}" if keys else "no key is needed"
        yield Finding("API keys", Grade.OK, found)
    try:
        file = config_path(scope.config)
    except ConfigError:
        file = None  # `check_settings` says so
    if file is not None:
        yield _who_may(file, "configuration file", 0o022, "change")
    if server.tls_cert is not None:
        yield _who_may(Path(server.tls_key or server.tls_cert), "TLS key", 0o077, "read")


def _who_may(path: Path, name: str, bits: int, verb: str) -> Finding:
    path = path.expanduser()
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        fix = "put it there, or correct the setting that names it"
        return Finding(name, Grade.FAIL, f"{path}: {error.strerror}", fix)
    if mode & bits:
        fix = f"chmod 600 {shlex.quote(str(path))}"
        return Finding(name, Grade.WARN, f"other users may {verb} {path} (mode {mode:03o})", fix)
    return Finding(name, Grade.OK, f"only its owner may {verb} {path}")


def _changed(name: str, file: Path | None) -> Iterator[str]:
    """Describe a section's non-default settings."""
    section = SECTIONS[name]
    written = written_settings(section, {}, file)
    for key, field in fields_of(section).items():
        if key not in written:
            continue
        value = field.read(written[key].value, written[key].origin)
        if value != field.default:
            is_secret = field.setting.is_key or field.type is dict
            shown = "(set)" if is_secret else field.shown(value)
            yield f"[{name}] {key} = {shown} by {_short(written[key].origin, file)}"


def _short(origin: str, file: Path | None) -> str:
    return "the file" if file is not None and origin.startswith(f"{file}: ") else origin
