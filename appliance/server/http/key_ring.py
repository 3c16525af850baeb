"""The accepted API keys, reloaded after changes of their file."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from appliance.config import key_file, known_keys
from appliance.errors import ConfigError
from appliance.long_lived import tell

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.config import ServerConfig
    from appliance.config.api_keys import ApiKey

SECONDS_BETWEEN_LOOKS = 1.0

logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, int] | None


class KeyRing:
    """Maps names to keys; ignores a file that becomes invalid, with one warning.

    Raises:
        ConfigError: the key file is unusable.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.observers: list[
            Callable[[Mapping[str, ApiKey]], None]
        ] = []  # called with changed keys
        self._config = config
        self._clock = clock
        self._looked = clock()
        self._stamp = self._read_stamp()
        self._keys = known_keys(config)

    def __call__(self) -> Mapping[str, ApiKey]:
        """Return the current keys by name; empty means that the server needs none."""
        now = self._clock()
        if now - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked = now
            stamp = self._read_stamp()
            if stamp != self._stamp:
                self._stamp = stamp
                self._read()
        return self._keys

    def _read(self) -> None:
        try:
            keys = known_keys(self._config)
        except ConfigError as error:
            logger.warning("API keys stay as they were: %s", error)
            return
        if keys == self._keys:
            return
        self._keys = keys
        logger.info("API keys were read again: %s", ", ".join(keys))
        tell(self.observers, keys)

    def _read_stamp(self) -> _Stamp:
        path = key_file(self._config)
        if path is None:
            return None
        try:
            found = os.stat(path)
        except OSError:
            return (0, 0, 0)
        return found.st_ino, found.st_size, found.st_mtime_ns
