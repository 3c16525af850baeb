"""Checks API keys by digest and limits guessing."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.config.api_keys import digest_of
from appliance.errors import AuthError
from appliance.log import RepeatedWarningFilter
from appliance.server.http.errors import TooManyWrongKeysError
from appliance.server.http.limits import Bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from appliance.config.api_keys import ApiKey

BURST = 10  # different wrong keys from an address at once
SECONDS_PER_GUESS = 6.0  # until an address may try another
PAUSE_SECONDS = 1.0  # before a key from an address that guesses is compared
_MAX_ADDRESSES = 4096
_MAX_REMEMBERED = 64  # wrong keys per address, and right ones

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedWarningFilter(600.0))


@dataclass(slots=True)
class _Guesser:
    guesses: Bucket
    wrong: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # digests, oldest first
    right: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # since it guesses


class WrongKeyLimit:
    """Limits wrong keys by address.

    Counts only different keys: a program with a wrong key repeats it, and must not lock out others
    on its machine.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.guessers: OrderedDict[str, _Guesser] = OrderedDict()

    def check(self, address: str) -> None:
        """Raise TooManyWrongKeysError if an address may not try another key now."""
        guesser = self.guessers.get(address)
        if guesser is not None and (seconds := guesser.guesses.seconds_until(1)):
            raise TooManyWrongKeysError(seconds)

    def is_guessing(self, address: str) -> bool:
        guesser = self.guessers.get(address)
        return guesser is not None and bool(guesser.guesses.seconds_until(1))

    def accept(self, address: str, digest: bytes) -> None:
        """Remember a right key of an address from which others guess."""
        if (guesser := self.guessers.get(address)) is not None:
            guesser.right[digest] = None
            if len(guesser.right) > _MAX_REMEMBERED:
                guesser.right.popitem(last=False)

    def knows(self, address: str, digest: bytes) -> bool:
        guesser = self.guessers.get(address)
        return guesser is not None and digest in guesser.right

    def note(self, address: str, digest: bytes) -> None:
        """Count a wrong key from an address."""
        guesser = self.guessers.pop(address, None)
        if guesser is None:
            guesser = _Guesser(Bucket(BURST, BURST * SECONDS_PER_GUESS, self._clock))
        self.guessers[address] = guesser  # now the most recent
        if len(self.guessers) > _MAX_ADDRESSES:
            self.guessers.popitem(last=False)
        if digest in guesser.wrong:
            guesser.wrong.move_to_end(digest)
            return
        guesser.wrong[digest] = None
        if len(guesser.wrong) > _MAX_REMEMBERED:
            guesser.wrong.popitem(last=False)
        guesser.guesses.take(1)
        if guesser.guesses.seconds_until(1):
            logger.warning("%s tries API keys; it has to wait between two", address)


class KeyCheck:
    """Compares keys by digest; accepts every request if the server has none.

    Args:
        known: returns the current keys by name.
    """

    def __init__(
        self, known: Callable[[], Mapping[str, ApiKey]], limit: WrongKeyLimit | None = None
    ) -> None:
        self._known = known
        self._limit = limit or WrongKeyLimit()

    def pause(self, authorization: Sequence[str], api_keys: Sequence[str], address: str) -> float:
        """Return the seconds to wait before `check`; 0 unless somebody at the address guesses.

        Wrong keys so delay a right one and never refuse it, and each guess holds a connection. A
        key that was right from there meanwhile is not delayed again.
        """
        network = _network(address)
        if not self._known() or not self._limit.is_guessing(network):
            return 0.0
        digests = [digest_of(key) for key in (*map(_bearer_key, authorization), *api_keys)]
        return 0.0 if all(self._limit.knows(network, one) for one in digests) else PAUSE_SECONDS

    def check(self, authorization: Sequence[str], api_keys: Sequence[str], address: str) -> str:
        """Compare keys with all known ones in constant time.

        Args:
            address: the client's; empty if unknown.

        Returns:
            The key's name; "" if the server needs none.

        Raises:
            AuthError: no key, or a wrong one.
            TooManyWrongKeysError: the address tried too many.
        """
        known = self._known()
        if not known:
            return ""
        keys = [*map(_bearer_key, authorization), *api_keys]
        if not keys:
            raise AuthError("an API key is needed: send it as Authorization: Bearer KEY")
        network = _network(address)
        digests = [digest_of(key) for key in keys]
        # All must be valid and the same holder's: a second header is no second guess.
        holders = {digest: _holder(known, digest) for digest in digests}
        if len(found := set(holders.values())) == 1 and (holder := found.pop()):
            for digest in digests:
                self._limit.accept(network, digest)
            return holder  # whoever else guesses at this address
        self._limit.check(network)
        for digest, name in holders.items():
            if not name:
                self._limit.note(network, digest)
        raise AuthError("the API key is wrong")


def _holder(known: Mapping[str, ApiKey], digest: bytes) -> str:
    found = ""
    for name, key in known.items():
        if hmac.compare_digest(digest, key.digest):
            found = name
    return found


def _network(address: str) -> str:
    """Return an address; for IPv6 its network, of which one machine has billions of addresses."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    return str(parsed.ipv4_mapped or ipaddress.IPv6Network((int(parsed), 64), strict=False))


def _bearer_key(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
